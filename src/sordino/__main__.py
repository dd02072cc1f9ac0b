"""python -m sordino: the command line."""

from sordino.cli import main

raise SystemExit(main())
