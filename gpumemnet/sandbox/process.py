"""Runs a user's code in a child process: extraction, tracing and planning do.

User code cannot affect the caller.  :func:`asking` sends requests to a child process and returns its
answers.  The child has a deadline and sees no GPU.  If it crashes, hangs or exits, the caller gets
one error message.  Of this project user code can import only ``gpumemnet``, so a ``models`` or
``service`` package of the user's own is the one that it imports.  Whatever it prints goes to
standard error.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import math
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from pkgutil import resolve_name
from select import select
from time import monotonic, process_time
from types import FrameType
from typing import IO, Any, Final, NoReturn

import gpumemnet
from gpumemnet.atomic_files import Document
from gpumemnet.errors import (
    CodeEndedError,
    ExtractError,
    GpumemnetError,
    InvalidRequestError,
    check_installed,
)
from gpumemnet.sandbox import end_with_parent
from gpumemnet.sandbox.checkpoint import begin
from gpumemnet.sandbox.user_code import checkout_folder, user_calls, user_location

NO_COMPILING: Final = "TORCHDYNAMO_DISABLE"
"""Variable by which PyTorch compiles nothing; a child has it unless it is told otherwise."""
_MAX_DEADLINE_SECONDS: Final = 86_400.0
_GRACE_SECONDS: Final = 15.0
_GRACE_SHARE: Final = 0.2
"""Time that the child has after the deadline to answer with what it has seen, or to say where it
was, before it is killed: the longer it ran, the more it has seen."""
_POLL_SECONDS: Final = 0.1
_REPEAT_SECONDS: Final = 0.5
"""The alarm repeats at this interval: Python only prints an exception that is raised in a callback,
of a weak reference say."""
_TERMINAL_SIZE: Final = (24, 80)
_STEP: Final = "step: "
"""Begins a line that the child writes where a status would be."""
_END_OF_INPUT: Final = b"\x04" * 100
"""Each ends one read."""

Progress = Callable[[str], None]
"""Called with a few words on what the child does now."""


def start_child(
    function: Callable[..., object],
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Call a function of this project in a new interpreter.

    Args:
        function: found by its module and its name.
        arguments: of the function.
        variables: further environment variables.
        options: of :class:`subprocess.Popen`.
    """
    root = str(Path(gpumemnet.__path__[0]).parent)
    users = {**os.environ, **(variables or {})}
    path = os.pathsep.join(filter(None, (root, users.get("PYTHONPATH"))))
    module, name = function.__module__, function.__qualname__
    program = f"import sys; from {module} import {name} as function; function(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments],
        env={**users, "PYTHONPATH": path},
        **options,
    )


def ask(
    compute: Callable[[Document], object],
    source: str,
    request: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Return a child's answer to one ``request``; arguments and errors as for :func:`asking`."""
    with asking(compute, source, **options) as asked:
        return asked(request)


@contextmanager
def asking(
    compute: Callable[[Document], object],
    source: str,
    *,
    purpose: str,
    deadline_seconds: float,
    variables: Mapping[str, str] | None = None,
    show_output: bool = False,
    progress: Progress | None = None,
) -> Iterator[Callable[[Mapping[str, Any]], Any]]:
    """Context of a function that returns the child's answer to a request; both are JSON.

    A later request is answered from the checkpoint that the code has come to in an earlier one, see
    :mod:`gpumemnet.sandbox.checkpoint`; by a new child, if there is none.

    Args:
        compute: a function of a module that loads no torch; the child calls it with the request. It
            returns a JSON value or raises a :class:`~gpumemnet.errors.GpumemnetError`.
        source: the user's file; error messages about its code begin with it.
        purpose: what torch is needed for; for the error message when it is not installed.
        deadline_seconds: time for everything that all requests need, including the import of torch.
        variables: further environment variables of the child.
        show_output: whether to pass what user code prints on to standard error.
        progress: called with what the child does.

    Raises:
        CodeEndedError: the code ended before there was an answer; its last line of output is
            quoted.
        ExtractError: says what is wrong with the user's code, and where.
        InvalidRequestError: the deadline is out of range, or the child rejected the request.
        KeyboardInterrupt: the child was interrupted.
        MissingExtraError: torch is not installed.
    """
    if not (math.isfinite(deadline_seconds) and 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS):
        raise InvalidRequestError(
            f"must be above 0 and at most {_MAX_DEADLINE_SECONDS:,.0f} seconds", "deadline"
        )
    check_installed("torch", "extract", purpose)
    child: _Child | None = None
    end = monotonic() + deadline_seconds

    def asked(request: Mapping[str, Any]) -> Any:
        nonlocal child
        try:
            seconds = end - monotonic()
            if seconds <= 0:  # earlier requests took it
                raise TimeoutError
            if child is None or not child.is_running:
                child = children.enter_context(
                    _Child(compute, variables or {}, heard.fileno(), show_output, progress)
                )
            text, status = child.ask(request, seconds)
        except TimeoutError:
            if child is not None:
                child.end()
            raise ExtractError(
                f"{source}: was not done after {deadline_seconds:g} seconds and was stopped: raise --deadline"
            ) from None
        if not text:
            raise CodeEndedError(f"{source}: {_exit_reason(status)}{child.last_line()}")
        answer = json.loads(text)
        if "interrupted" in answer:
            raise KeyboardInterrupt
        if answer.get("ended"):
            raise CodeEndedError(f"{source}: {answer['error']}{child.last_line()}")
        if "field" in answer:
            raise InvalidRequestError(answer["error"], answer["field"])
        if "error" in answer:
            raise ExtractError(
                f"{source}: {answer['error']}{child.last_line() if answer.get('quotes') else ''}"
            )
        return answer["answer"]

    with _file() as heard, ExitStack() as children:
        yield asked


class _Child(ExitStack):
    """A child process that answers requests, one after the other; other arguments as for
    :func:`asking`.

    Args:
        heard: descriptor of the file that keeps what user code has read of standard input.
    """

    def __init__(
        self,
        compute: Callable[[Document], object],
        variables: Mapping[str, str],
        heard: int,
        show_output: bool,
        progress: Progress | None,
    ) -> None:
        super().__init__()
        self._progress = progress
        # Files, where it is the end that is waited for: a process that user code leaves running
        # would keep a pipe open.
        self._answer, self._output = [self.enter_context(_file()) for _ in range(2)]
        self._printed = 0
        received, self._requests = map(self.enter_context, _pipe())
        self._statuses, statuses = map(self.enter_context, _pipe())
        given = os.dup(0)
        self._envelope = {
            "pythonpath": variables.get("PYTHONPATH", os.environ.get("PYTHONPATH")),
            "progress": progress is not None,
            "statuses": statuses.fileno(),
            "input": (given, heard),
        }
        self._process = start_child(
            _answer,
            f"{compute.__module__}:{compute.__qualname__}",
            variables={NO_COMPILING: "1", **variables, "CUDA_VISIBLE_DEVICES": ""},
            stdin=received,
            stdout=self._answer,
            stderr=None if show_output else self._output,
            pass_fds=[statuses.fileno(), given, heard],
            start_new_session=True,
        )
        os.close(given)
        self.callback(self.end)
        received.close()
        statuses.close()

    def ask(self, request: Mapping[str, Any], seconds: float) -> tuple[str, int]:
        """Return the answer to a request, empty if there is none, and the exit status.

        Raises:
            TimeoutError: there is none in time.
        """
        self._printed = os.fstat(self._output.fileno()).st_size
        with suppress(BrokenPipeError):  # its status tells why
            self._requests.write(
                json.dumps(
                    {**self._envelope, "deadline_seconds": seconds, "request": request}
                ).encode()
                + b"\n"
            )
        status = self._wait(monotonic() + seconds + max(_GRACE_SECONDS, _GRACE_SHARE * seconds))
        self._answer.seek(0)
        text = self._answer.read().decode()
        self._answer.seek(0)
        self._answer.truncate()
        return text, status

    def _wait(self, end: float) -> int:
        """Return the exit status of the process that has answered; meanwhile, report its
        progress."""
        while monotonic() < end:
            ended, _, _ = select([self._statuses], [], [], min(_POLL_SECONDS, end - monotonic()))
            line = self._statuses.readline().decode() if ended else ""
            if line and not line.startswith(_STEP):
                return int(line)
            if line and self._progress:
                self._progress(line[len(_STEP) : -1])
                continue
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(_POLL_SECONDS if ended else 0.0)
        raise TimeoutError

    @property
    def is_running(self) -> bool:
        """Whether it waits for a further request."""
        return self._process.returncode is None

    def end(self) -> None:
        """End the process, with all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_line(self) -> str:
        """What user code has printed last since the request, as the end of a sentence."""
        begin = max(self._printed, os.fstat(self._output.fileno()).st_size - 4096)
        # progress bars return to the start of their line
        text = os.pread(self._output.fileno(), 4096, begin).decode(errors="replace")
        lines = re.split("[\n\r]", text)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its last output was: {last[:200]}" if last else ""


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)


def _exit_reason(status: int) -> str:
    """Why a process ended that has given no answer, by its exit status."""
    if status == -signal.SIGKILL:
        return "the system killed the process, most likely because it used too much memory"
    if status < 0:
        return f"the code crashed the interpreter ({signal.Signals(-status).name})"
    return f"the code exited the program with exit code {status} before there was an answer"


class DeadlineReached(BaseException):
    """Raised in user code at the deadline; ``except Exception`` does not catch it."""


def _answer(compute: str) -> NoReturn:
    """Answer one request in the child process, and exit at once, even if user code has left threads
    running.

    Args:
        compute: ``module:function``.
    """
    function = resolve_name(compute)
    envelope = begin(os.fdopen(os.dup(0), "rb", 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # its last line comes before a later one on stderr
    _give_terminal()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Input(*envelope["input"])))
    _set_import_path(envelope["pythonpath"])
    if envelope["progress"]:
        _report_progress(envelope["statuses"])
    answer: Document
    started = monotonic()
    try:
        set_alarm(envelope["deadline_seconds"])
        answer = {"answer": function(envelope["request"])}
    except InvalidRequestError as error:
        answer = {"error": error.reason, "field": error.field}
    except GpumemnetError as error:
        answer = {
            "error": str(error),
            "ended": isinstance(error, CodeEndedError),
            "quotes": isinstance(error.__cause__, CodeEndedError),
        }
    except DeadlineReached as error:
        stop_alarm()
        where = user_calls(error)
        within = f" (it was at {where})" if where else ""
        # An alarm that was shortened has come earlier.
        seconds = round(min(envelope["deadline_seconds"], round(monotonic() - started)), 1)
        answer = {"error": f"was not done after {seconds:g} seconds{within}: raise --deadline"}
    except SystemExit as error:
        answer = {
            "error": f"the code exited the program: {user_location(error)}: sys.exit({error.code!r})",
            "ended": True,
        }
    except KeyboardInterrupt:
        answer = {"interrupted": True}
    stop_alarm()
    json.dump(answer, answers)
    for stream in (answers, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _give_terminal() -> None:
    """Let user code find a terminal of the usual size as its standard input: some ask for the size,
    with ``stty size`` say.

    Where a program that it starts reads, it finds the end of input.  Where the system gives no terminal, it finds an
    empty file.
    """
    try:
        held, given = os.openpty()  # both stay open until this process ends
        fcntl.ioctl(given, termios.TIOCSWINSZ, struct.pack("4H", *_TERMINAL_SIZE, 0, 0))
        os.write(held, _END_OF_INPUT)
    except OSError:
        given = os.open(os.devnull, os.O_RDONLY)
    os.dup2(given, 0)


class _Input(io.FileIO):
    """The caller's standard input, which each trace of the code reads from the beginning.

    Args:
        given: its descriptor.
        heard: descriptor of a file with what was read of it.
    """

    def __init__(self, given: int, heard: int) -> None:
        super().__init__(0, closefd=False)  # a terminal, as code may ask
        self._given, self._heard, self._position = given, heard, 0

    def readinto(self, buffer: Any) -> int:
        """Read what an earlier trace has read, then what is next."""
        text = os.pread(self._heard, len(buffer), self._position)
        if not text:
            logging.getLogger(__name__).info("waiting for what the code reads (--show-output)")
            text = os.read(self._given, len(buffer))
            os.pwrite(self._heard, text, self._position)
        self._position += len(text)
        buffer[: len(text)] = text
        return len(text)

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # which call it


class _ProgressHandler(logging.Handler):
    """Writes the log records of this project to the parent, one line each."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message of ``record``."""
        os.write(self._descriptor, f"{_STEP}{record.getMessage()}\n".encode())


def _report_progress(descriptor: int) -> None:
    logger = logging.getLogger("gpumemnet")
    logger.addHandler(_ProgressHandler(descriptor))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _set_import_path(pythonpath: str | None) -> None:
    """Give child processes the user's own ``PYTHONPATH``, and take a checkout off the import path.

    A checkout holds ``models`` and ``service`` beside ``gpumemnet``.  They would be found in place
    of a user's ``models/`` without an ``__init__.py``, even behind it on the path.  ``gpumemnet``
    is imported by now and needs no path.
    """
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    take_off_import_path()


def take_off_import_path() -> None:
    """Take a checkout of this project off the import path."""
    if (checkout := checkout_folder()) is not None:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(checkout)]


_alarm_is_stopped = False


def stop_alarm() -> None:
    """Let this process go on after its deadline, for the few seconds until its parent ends it."""
    global _alarm_is_stopped
    _alarm_is_stopped = True  # first: a signal may have come whose handler has not run
    signal.setitimer(signal.ITIMER_REAL, 0)


def set_alarm(deadline_seconds: float) -> None:
    """Let this process raise :class:`DeadlineReached` after so many seconds."""
    global _alarm_is_stopped

    def stop(number: int, frame: FrameType | None) -> None:
        if not _alarm_is_stopped:
            raise DeadlineReached

    _alarm_is_stopped = False
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds, _REPEAT_SECONDS)


@dataclass(frozen=True)
class _ShortAlarm:
    """An alarm before the deadline.

    Attributes:
        last: when it comes at the latest, on the monotonic clock.
        end: after how much CPU time of this process it comes.
        deadline: when that is, on the monotonic clock.
        goes_on: called as it comes; returns whether another one was set.
    """

    last: float
    end: float
    deadline: float
    goes_on: Callable[[FrameType | None], bool]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        more = min(self.last - monotonic(), self.end - process_time())
        if _alarm_is_stopped:
            return
        if more > 0:
            signal.setitimer(signal.ITIMER_REAL, more, _REPEAT_SECONDS)
        elif not self.goes_on(frame):
            raise DeadlineReached


def shorten_alarm(seconds: float, goes_on: Callable[[FrameType | None], bool]) -> bool:
    """Let the alarm of this process come after so many seconds of its CPU time, in the place of
    another short one, and no later than the deadline: on a busy machine these take longer, up to
    three times as long.

    Args:
        seconds: these.
        goes_on: called with the frame that runs as the alarm comes; returns whether it has set
            another one, or raises an error of its own.

    Returns:
        Whether there is so much time.
    """
    known = signal.getsignal(signal.SIGALRM)
    left = signal.getitimer(signal.ITIMER_REAL)[0] or math.inf
    deadline = known.deadline if isinstance(known, _ShortAlarm) else monotonic() + left
    last = min(deadline, monotonic() + 3 * seconds)
    has_time = deadline - monotonic() > seconds
    with suppress(ValueError):  # not in the main thread
        if has_time:
            alarm = _ShortAlarm(last, process_time() + seconds, deadline, goes_on)
            signal.signal(signal.SIGALRM, alarm)
            signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
    return has_time


@contextmanager
def alarm_waits() -> Iterator[None]:
    """Context of waiting for another process, such as one that reads samples: until the deadline, a
    shorter alarm comes as much later."""
    known, start = signal.getsignal(signal.SIGALRM), monotonic() - process_time()
    if (
        not isinstance(known, _ShortAlarm)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    waits = replace(known, last=known.deadline)
    signal.signal(signal.SIGALRM, waits)
    try:
        yield
    finally:
        waited = monotonic() - process_time() - start
        last = min(known.last + waited, known.deadline)
        if signal.getsignal(signal.SIGALRM) is waits:
            signal.signal(signal.SIGALRM, replace(known, last=last))


# Worker processes for torch work of our own: one core and one thread each.

_CHUNK: Final = 4
"""Tasks per message to a worker: few enough that all workers end together, many enough that
messages cost nothing."""


def in_processes(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int | None
) -> Iterator[Any]:
    """Call ``function`` with the arguments of each task in a pool of new processes, one for each
    core by default, and yield the results in order."""
    if tasks:
        with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool:
            yield from pool.map(function, *zip(*tasks, strict=True), chunksize=_CHUNK)


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)  # more threads would only wait for those of the other processes
    end_with_parent()
