"""The command `quadjet`: the group, its global options, and how failures become exit codes.

0: done. 1: the job failed. 2: bad use, a bad setting included. 130: interrupted.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

import click

from ..agent_tasks.errors import TaskError
from ..engine.errors import QuadjetError
from . import cli_daemon, cli_engine, cli_model, cli_setup, cli_tasks
from .cli_output import say
from .cli_settings import Settings
from .config import ConfigError

FAILED, BAD_USE, INTERRUPTED = 1, 2, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("quadjet"), prog_name="quadjet", message="%(prog)s %(version)s")
@click.option("--set", "flags", multiple=True, metavar="KEY=VALUE", help="A setting for this call, such as engine.model=NAME.")
@click.pass_context
def quadjet(context: click.Context, flags: tuple[str, ...]) -> None:
    """Background coding agents on a local model: send a file, go on working, review the proposal."""
    pairs = [flag.partition("=") for flag in flags]
    for key, equals, value in pairs:
        if not equals:
            raise click.BadParameter(f"{key + value!r} is not KEY=VALUE", param_hint="--set")
    context.obj = Settings({key: value for key, _, value in pairs})


for verbs in (cli_daemon, cli_tasks, cli_model, cli_engine, cli_setup):
    for verb in verbs.VERBS:
        quadjet.add_command(verb)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit the process with its code."""
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        code = quadjet.main(arguments, prog_name="quadjet", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = BAD_USE if isinstance(error, click.UsageError) else FAILED
    except (QuadjetError, TaskError) as error:
        say(f"quadjet: {error}")
        code = BAD_USE if isinstance(error, ConfigError) else FAILED
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader has left. What is still in the buffer must not raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
