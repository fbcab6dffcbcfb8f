"""Errors of the command line: one line each, with a traceback only with `--debug`."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from reader_rag.cli.display.terminal import print_error
from reader_rag.errors import ReaderError
from reader_rag.util.one_line import one_line

# Newer typer contains a copy of click; the class is found through a public one, whichever click that is from.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_USAGE_STATUS = 2
_DEBUG = "--debug"
_ARGUMENT = re.compile(r"""(?<![\w/?&.])([a-z_]+)=(True\b|'[^']*'|"[^"]*"|[\w.]*)""")


class OneLineErrors(TyperGroup):
    """A group whose commands report errors in one line on standard error.

    The exit status is 1 for an error and 2 for a wrong command line. `--debug`, anywhere before `--`, shows the
    traceback of an error instead.
    """

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the group's own arguments."""
        try:
            return super().make_context(info_name, _debug_first(list(args)), parent, **extra)
        except _UsageError as error:
            raise _usage_exit(error) from error

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except _UsageError as error:
            raise _usage_exit(error) from error
        except Exception as error:
            if ctx.params.get("debug") or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            print_error(in_flags(_explain(error), self._flags(ctx)))
            raise typer.Exit(1) from error

    def _flags(self, ctx: Any) -> dict[str, str]:
        """The options of the command that runs, by the name of their Python argument."""
        command = self.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
        commands = [command, *getattr(command, "commands", {}).values()]
        return {
            parameter.name: max(parameter.opts, key=len)
            for one in commands
            if one is not None
            for parameter in one.params
            if parameter.name and parameter.opts[0].startswith("-")
        }


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """A message of the library, which names Python arguments, with the flags of a command.

    Args:
        text: The message, with arguments as `name=value`, or `name=` alone.
        flags: The command's options by the names of their arguments.

    Returns:
        The message: `dtype='float32'` is `--dtype float32` in it, `follow_links=True` is `--follow-links`. Arguments
        that the command does not have stay as they are.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in flags:
            return match.group()
        return flags[name] if value in ("", "True") else f"{flags[name]} {value.strip(chr(34) + chr(39))}"

    return _ARGUMENT.sub(flag, text)


def _debug_first(args: list[str]) -> list[str]:
    """The arguments with `--debug` first, where the group reads it."""
    end = args.index("--") if "--" in args else len(args)
    if _DEBUG not in args[:end]:
        return args
    return [_DEBUG, *(arg for arg in args[:end] if arg != _DEBUG), *args[end:]]


def _usage_exit(error: Any) -> BaseException:
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
        return error  # type: ignore[no-any-return]
    command = error.ctx.command_path if error.ctx is not None else "reader-rag"
    print_error(f"{one_line(error.format_message())} ({command} --help shows how)")
    return typer.Exit(_USAGE_STATUS)


def _explain(error: Exception) -> str:
    text = one_line(str(error))
    if isinstance(error, ReaderError):
        return text
    name = type(error).__name__
    return f"unexpected {name}{': ' if text else ''}{text} (run it again with {_DEBUG} for the traceback)"
