#!/usr/bin/env python3
"""Stands for scp to another machine's home directory: ``scp FILE ... MACHINE:``; see ``Machine.run``."""

import shutil
import sys
from pathlib import Path

*files, target = sys.argv[1:]
outbox = Path("/srv/outbox") / target.removesuffix(":")
outbox.mkdir(exist_ok=True)
for file in files:
    shutil.copy(file, outbox)
