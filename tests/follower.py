"""A rank other than the first, for a test that is rank 0 itself."""

import os
import sys

from services.trainer.__main__ import follow
from tests.ranks import joined

if __name__ == "__main__":
    follow(joined(shard_ranks=int(sys.argv[1]), offload=sys.argv[2] == "offload"))
    sys.stdout.flush()
    os._exit(0)
