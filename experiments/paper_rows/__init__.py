"""The rows of experiments/PAPERS.md, a file for each paper; `row` has what they share."""
