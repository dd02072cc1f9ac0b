"""`python -m sordino` is the command `sordino`."""

from sordino.cli import main

raise SystemExit(main())
