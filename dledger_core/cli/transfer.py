"""``dledger transfer``: transfer leadership to another node."""

from __future__ import annotations

import click

from dledger_core.cli.help import command, examples
from dledger_core.cli.options import Connection, complete_node, connection_options, format_option
from dledger_core.cli.output import Format, show_result


@command(epilog=examples("dledger transfer n2"))
@connection_options
@format_option
@click.argument("node", metavar="NODE", shell_complete=complete_node)
def transfer(connection: Connection, output: Format, node: str) -> None:
    """Transfer leadership to another node.

    No entry is lost; appends pause for a moment. If the group has a preferred leader, leadership returns to that node
    after about five minutes.
    """
    with connection.client() as client:
        client.transfer_leadership(node)
    show_result({"group": connection.group, "leader_id": node}, output)
