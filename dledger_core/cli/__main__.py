"""``python -m dledger_core.cli``: the ``dledger`` command with this interpreter."""

from dledger_core.cli.root import main

main()
