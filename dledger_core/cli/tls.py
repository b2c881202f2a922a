"""``dledger tls``: certificates and tokens for nodes and clients."""

from __future__ import annotations

from pathlib import Path

import click

from dledger_core.certificates import DAYS, new_token, principal_entry, write_certificates, write_private
from dledger_core.cli.help import CommandGroup, examples, option
from dledger_core.cli.options import format_option, peers_option
from dledger_core.cli.output import Format, emit, say, show_result
from dledger_core.config import Peer, is_loopback, parse_peers


@click.group(cls=CommandGroup)
def tls() -> None:
    """Make certificates and tokens."""


def _hosts(peer: Peer) -> list[str]:
    return [peer.host, *(["localhost"] if is_loopback(peer.host) and peer.host != "localhost" else [])]


@tls.command(
    "dev",
    epilog=examples(
        "dledger tls dev certificates --peers 'n0-10.0.0.1:40911;n1-10.0.0.2:40911;n2-10.0.0.3:40911'",
        "dledger serve --tls-cert certificates/n0.pem --tls-key certificates/n0.key "
        "--peer-ca certificates/nodes-ca.pem --tls-ca certificates/clients-ca.pem "
        "--tokens certificates/principals.toml ...",
        "dledger append hello --tls-ca certificates/nodes-ca.pem --token-file certificates/token",
    ),
)
@peers_option(required=True, needs_ids=True)
@option(
    "--principal",
    default="dev",
    show_default=True,
    metavar="NAME",
    help="Client with all permissions on all groups; it gets a certificate and a token.",
)
@option(
    "--days",
    type=click.IntRange(1, 3650),
    default=DAYS,
    show_default=True,
    metavar="NUMBER",
    help="Days until the certificates expire.",
)
@format_option
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def dev(peers: str, principal: str, days: int, output: Format, directory: Path) -> None:
    """Make two authorities, certificates and a token in DIR, to try TLS.

    An authority for the nodes and one for the clients, a certificate for each node of --peers, and a client with all
    permissions. Called again it keeps authorities, token and principals, and makes new certificates, which running
    nodes use for new connections. For production keep the keys of the authorities (*-ca.key) away from the nodes.
    """
    nodes = [(str(peer.node_id), _hosts(peer)) for peer in parse_peers(peers)]
    files = write_certificates(directory, nodes, principal, days)
    show_result(
        {
            "peer_ca": files.nodes_ca,
            "client_ca": files.clients_ca,
            "nodes": ", ".join(str(files.cert(node)) for node, _ in nodes),
            "client": files.cert(principal),
            "tokens": files.tokens,
            "token_file": files.token,
        },
        output,
        "made",
    )


@tls.command("token", epilog=examples("dledger tls token ingest --file ingest.token >> principals.toml"))
@option(
    "--file",
    "path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    missing="name the file that gets the token",
    help="File that gets the token; only its owner can read it.",
)
@click.argument("name")
def token(path: Path, name: str) -> None:
    """Make a token for the principal NAME, and print its entry for the file of --tokens.

    The entry contains the SHA-256 of the token, and permission to read all groups: edit the lists.
    """
    made = new_token()
    write_private(path, f"{made}\n".encode())
    emit(principal_entry(name, made).rstrip())
    say(f"the token is in {path}; give it to the client with --token-file")
