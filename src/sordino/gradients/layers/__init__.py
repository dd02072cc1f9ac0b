"""Rules for operations on parameters: a record's gradient, one file per family of layers."""
