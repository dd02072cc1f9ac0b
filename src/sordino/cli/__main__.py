from sordino.cli import main

raise SystemExit(main())
