"""``dledger completion``: print a completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dledger_core.cli.help import command, examples
from dledger_core.cli.output import emit


@command(
    epilog=examples(
        'eval "$(dledger completion bash)"',
        "dledger completion zsh > ~/.zfunc/_dledger",
        "dledger completion fish > ~/.config/fish/completions/dledger.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a completion script for bash, zsh or fish."""
    found = get_completion_class(shell)
    assert found is not None
    emit(found(context.find_root().command, {}, "dledger", "_DLEDGER_COMPLETE").source())
