"""`python -m sordino` is the command `sordino`."""

import os
import sys

from sordino.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Under torchrun, threads of gloo may still be freeing tensors when the interpreter shuts down, which aborts the
        # process (github.com/pytorch/pytorch/pull/179291). Everything is written by now, so skip the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
