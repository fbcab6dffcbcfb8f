"""No call that only POSIX, or only Linux, has stands without a guard: Windows and macOS are not tested on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "reader_rag").rglob("*.py"), *(ROOT / "connectors").rglob("*.py")])

MODULES = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
"""Modules that Windows lacks."""
ATTRIBUTES = {
    "os": {
        *("chown", "chroot", "eventfd", "fchown", "fdatasync", "fork", "forkpty", "getegid", "geteuid", "getgid"),
        *("getgroups", "getloadavg", "getpgid", "getpriority", "getuid", "killpg", "lchown", "memfd_create", "mkfifo"),
        *("mknod", "nice", "pread", "preadv", "pwrite", "register_at_fork", "sched_getaffinity", "sched_setaffinity"),
        *("sched_setscheduler", "sendfile", "setgid", "setpgid", "setpriority", "setsid", "setuid", "statvfs", "sync"),
        *("uname", "wait", "wait3", "wait4", "waitid", "WIFEXITED", "WNOHANG"),
        *("O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOATIME", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC"),
    },
    "signal": {
        *("SIGALRM", "SIGBUS", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP"),
        *("SIGUSR1", "SIGUSR2", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait"),
    },
    "select": {"epoll", "kqueue", "poll"},
    "socket": {"AF_NETLINK", "AF_UNIX", "SO_REUSEADDR", "SO_REUSEPORT", "socketpair"},
    "time": {"clock_gettime", "tzset"},
}
"""Attributes of modules that Windows, or macOS, lacks, or that mean something else there."""
METHODS = {"add_signal_handler", "madvise"}
"""Methods of objects of the standard library that Windows lacks."""
ARGUMENTS = {"preexec_fn", "pass_fds", "process_group", "user", "umask"}
"""Arguments of `subprocess.Popen` that raise an error on Windows."""
FOLDERS = ("/dev/", "/etc/", "/proc/", "/sys/", "/tmp", "/var/")
GUARDS = ("hasattr(", "os.name", "sys.platform", "platform.system()", ".exists()", ".is_file()")
"""What a condition asks when it is a guard."""
ERRORS = {"AttributeError", "ImportError", "ModuleNotFoundError", "OSError"}
"""Errors that a missing call or file raises."""


def unguarded(source: str) -> list[str]:
    """The calls of a file that not every system has, and that no condition and no handled error guards.

    Args:
        source: Python code.

    Returns:
        "LINE: NAME" of each.
    """
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    docs = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = ((node, name) for node in ast.walk(tree) if node not in docs for name in _names(node))
    return [f"{node.lineno}: {name}" for node, name in found if not _is_guarded(node, parents, source)]


def _names(node: ast.AST) -> Iterator[str]:
    """What a node uses that not every system has."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in MODULES)
    elif isinstance(node, ast.ImportFrom):
        if node.module in MODULES:
            yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names if _is_rare(node.module or "", alias.name))
    elif isinstance(node, ast.Attribute):
        module = node.value.id if isinstance(node.value, ast.Name) else ""
        if _is_rare(module, node.attr) or node.attr in METHODS:
            yield f"{module}.{node.attr}"
    elif isinstance(node, ast.keyword):
        if node.arg in ARGUMENTS:
            yield str(node.arg)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(FOLDERS):
        yield node.value


def _is_rare(module: str, name: str) -> bool:
    if module == "mmap":
        return name.startswith(("MADV_", "MAP_", "PROT_"))
    return name in ATTRIBUTES.get(module, ())


def _is_guarded(node: ast.AST, parents: dict[ast.AST, ast.AST], source: str) -> bool:
    if isinstance(node, ast.Constant):  # naming a path asks nothing of the system; opening what is not there raises
        return _names_a_guarded_path(node, parents, source)
    at: ast.AST | None = node
    while at is not None:
        before, at = at, parents.get(at)
        if isinstance(at, (ast.If, ast.IfExp)) and before is not at.test and _asks(at.test, source):
            return True
        if isinstance(at, ast.If) and before is at.test and _asks(at.test, source):  # hasattr(x, "y") and x.y
            return True
        if isinstance(at, ast.Try) and before in at.body and any(_catches(handler.type) for handler in at.handlers):
            return True
        if isinstance(at, ast.With) and any(_suppresses(item.context_expr) for item in at.items):
            return True
    return False


def _names_a_guarded_path(node: ast.Constant, parents: dict[ast.AST, ast.AST], source: str) -> bool:
    """Whether a path is a constant of its module, and each use asks whether it is there or handles that it is not."""
    at: ast.AST = node
    while not isinstance(at, (ast.Assign, ast.AnnAssign)) and at in parents:
        at = parents[at]
    if not isinstance(at, ast.Assign) or not isinstance(parents.get(at), ast.Module):
        return _in_try(node, parents)
    (target,) = at.targets
    assert isinstance(target, ast.Name)
    uses = [
        one for one in parents if isinstance(one, ast.Name) and one.id == target.id and isinstance(one.ctx, ast.Load)
    ]
    return all(_in_try(use, parents) or f"{target.id}.exists()" in source for use in uses)


def _in_try(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    at: ast.AST | None = node
    while at is not None:
        before, at = at, parents.get(at)
        if isinstance(at, ast.Try) and before in at.body and any(_catches(handler.type) for handler in at.handlers):
            return True
    return False


def _asks(test: ast.expr, source: str) -> bool:
    return any(guard in (ast.get_source_segment(source, test) or "") for guard in GUARDS)


def _catches(handled: ast.expr | None) -> bool:
    if handled is None:
        return True
    kinds = handled.elts if isinstance(handled, ast.Tuple) else [handled]
    return any(isinstance(kind, ast.Name) and kind.id in ERRORS for kind in kinds)


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and ast.unparse(context.func).endswith("suppress")
        and any(map(_catches, context.args))
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_call_is_used_that_other_systems_lack(path: Path) -> None:
    assert unguarded(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fcntl", ["1: fcntl"]),
        ("from resource import getrlimit", ["1: resource"]),
        ("import os\nos.fork()", ["2: os.fork"]),
        ("import os\nif os.cpu_count():\n    os.getuid()", ["3: os.getuid"]),
        ("import signal\nsignal.signal(signal.SIGHUP, print)", ["2: signal.SIGHUP"]),
        ("from signal import SIGKILL", ["1: signal.SIGKILL"]),
        ("import mmap\nmmap.mmap(0, 1, flags=mmap.MAP_SHARED)", ["2: mmap.MAP_SHARED"]),
        ("data.madvise(1)", ["1: data.madvise"]),
        ("open('/proc/self/status')", ["1: /proc/self/status"]),
        ("PLACE = Path('/proc/self/status')\nPLACE.read_text()", ["1: /proc/self/status"]),
        ("Popen(command, preexec_fn=print)", ["1: preexec_fn"]),
    ],
)
def test_such_calls_are_found(source: str, found: list[str]) -> None:
    assert unguarded(source) == found


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None",
        "import os\nif hasattr(os, 'fork'):\n    os.fork()",
        "import os, sys\nif sys.platform == 'linux':\n    os.getuid()",
        "import os\ncount = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 1",
        "import signal\nwith suppress(AttributeError):\n    signal.alarm(1)",
        "PLACE = Path('/proc/self/status')\nif PLACE.exists():\n    PLACE.read_text()",
        "try:\n    open('/proc/self/status')\nexcept OSError:\n    pass",
        "import os\nflags = getattr(os, 'O_NONBLOCK', 0)",
        '"""A docstring on /proc/self/status."""',
    ],
)
def test_guarded_calls_are_not(source: str) -> None:
    assert unguarded(source) == []
