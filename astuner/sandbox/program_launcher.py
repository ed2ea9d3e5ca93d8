"""Runs one program in a sandbox, in a fork of `fork_server`. Imports the standard library only.

`json`, `pathlib` and `typing` would take longer to import than the server takes to start.

The job is one dictionary, encoded by `marshal`:

- `arguments`, `env`: the program and its environment variables;
- `python`: whether the arguments are a file of Python code and its arguments, which runs in this process, instead of
  `python -u`; with `isolated`, its folder is not in `sys.path`, and its output is buffered, as with `python -I`;
- `stdin`: a file of `files` that is the program's stdin; None, and it is empty;
- `folder`: a folder of the host that belongs to this call; `files`: the texts to write to it, by name;
- `root`: None, and the program sees the file system of the host, and works in `folder`. Otherwise, the program sees
  the readable paths and `root["mounts"]` only, folders of the host by their paths in the sandbox, and works in
  `root["cwd"]`;
- `readable`: the files and folders of the host that it can read;
- `limits`: see `SandboxLimits`.

The launcher writes dictionaries to the pipe of the report, each a line of Python literals: `pid`, its process id;
before the program starts, `missing`, the protections that this system does not have; at its end, `returncode` (-n if
signal n ended the program). If the system cannot make a `root`, it writes `unsupported`, the reason, and the program
does not start. The pipe closes when the launcher has ended.

The sandbox has three processes: the launcher, the init process of the program's PID namespace, and the program. When
init ends, the kernel ends all other processes of the namespace.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys
import warnings  # noqa: F401 `os.execvpe` imports it, when the program's file system may lack the standard library
from _signal import SIG_DFL, SIGKILL, SIGTERM, signal  # type: ignore[import-not-found]  # `signal` imports `enum`

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from astuner.sandbox import python_program
else:
    import python_program

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_RDONLY, _MS_NOSUID_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2 | 4, 8, 32, 4096, 16384
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE = 4
_PR_SET_SECUREBITS, _SECBIT_NOROOT_LOCKED, _CAPABILITIES_VERSION_3 = 28, 3, 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_NOBODY = 65534

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_READ = 1 | 4 | 8  # execute, read a file, read a folder
_LANDLOCK_FILE = 1 | 2 | 4 | 1 << 14  # the rights that a rule on a file may have
_LANDLOCK_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # of its first versions

# socket, io_uring_setup, ptrace, process_vm_readv, process_vm_writev, keyctl, add_key, bpf, unshare, setns, mount
_DENIED = {
    "x86_64": (0xC000003E, (41, 425, 101, 310, 311, 250, 248, 321, 272, 308, 165)),
    "aarch64": (0xC00000B7, (198, 425, 117, 270, 271, 219, 217, 280, 97, 268, 40)),
}
# kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal: without a PID namespace
_SIGNALS = {"x86_64": (62, 200, 129, 297, 424), "aarch64": (129, 130, 138, 240, 424)}
_SECCOMP_ALLOW, _SECCOMP_EPERM, _SECCOMP_KILL = 0x7FFF0000, 0x00050001, 0x80000000
_X32 = 0x40000000
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def run(job_file: int, stdout: int, stderr: int, report: int) -> NoReturn:
    """Run the program of a job in this process, which exits.

    Args:
        job_file: a file with the job.
        stdout, stderr, report: the ends of pipes to write to.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):  # 0 was the socket of the server
        os.dup2(source, target)
        os.close(source)
    server = os.getppid()
    with open(job_file, "rb") as file:
        job = marshal.load(file)
    job["report"] = report
    _report(job, pid=os.getpid())
    missing: list[str] = []
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        has_namespaces = _enter_root(job) if job["root"] else _enter_namespaces(job["folder"], job["limits"]["disk"])
    except OSError as error:
        _report(job, unsupported=str(error))
        os._exit(1)
    if not has_namespaces:
        missing.append("processes")
        signal(SIGTERM, lambda *_: os._exit(_kill_descendants()))
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, SIGTERM)
        if os.getppid() != server:
            os.kill(os.getpid(), SIGTERM)
    init = os.fork()
    if init == 0:
        signal(SIGTERM, SIG_DFL)
        if sys.platform == "linux":
            _LIBC.prctl(_PR_SET_PDEATHSIG, SIGKILL)
        _init(job, missing, has_namespaces)
    os.waitpid(init, 0)
    signal(SIGTERM, SIG_DFL)
    if not has_namespaces:
        _kill_descendants()
    os._exit(0)


def _enter_namespaces(folder: str, disk: int) -> bool:
    if sys.platform != "linux":
        return False
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        # The limit on processes does not apply to root's real user id. Files are opened with the effective one.
        try:  # noqa: SIM105 contextlib takes longer to import than the launcher takes
            os.setresuid(_NOBODY, 0, 0)
        except OSError:  # a user namespace may have no user `nobody`
            pass
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if _LIBC.unshare(flags) != 0:
        return False
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    options = f"size={disk},mode=700".encode()
    _LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID_NODEV, options)
    return True


def _enter_root(job: dict[str, Any]) -> bool:
    """Make the folder the root of a file system with the readable paths and the mounts, and change to it."""
    root, mounts = job["folder"], job["root"]["mounts"]
    if sys.platform != "linux" or os.uname().machine not in _PIVOT_ROOT:
        raise OSError(f"it needs Linux on {' or '.join(_PIVOT_ROOT)}")
    uid, gid = os.geteuid(), os.getegid()
    is_root = uid == 0 and _LIBC.unshare(_CLONE_NEWNS) == 0
    if is_root:  # root's folders are not open to the user `nobody`, who gets the namespaces
        _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        _mount_root(root, job["readable"], mounts)
    if uid == 0:
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError:  # a user namespace may have no user `nobody`
            pass
        uid, gid = os.geteuid(), os.getegid()
        _LIBC.prctl(_PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root
    _check(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")
    if not is_root:
        _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        _mount_root(root, job["readable"], mounts)
    return True


def _mount_root(root: str, readable: list[str], mounts: dict[str, str]) -> None:
    _check(_LIBC.mount(b"tmpfs", os.fsencode(root), b"tmpfs", _MS_NOSUID_NODEV, b"mode=755"), "mount")
    paths = [path for path in (*readable, *_DEVICES) if not path.startswith("/proc/")]
    # Without those below another one.
    paths = [path for path in paths if not any(path.startswith(f"{parent}/") for parent in paths)]
    for path in sorted({*paths, *mounts}, key=len):
        target = f"{root}{path}"
        if path in mounts:
            _bind(mounts[path], target, is_writable=True)
        elif os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        elif os.path.exists(path):
            _bind(path, target, is_writable=path in _DEVICES)
    os.chdir(root)
    os.makedirs("proc", exist_ok=True)
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{number}", f"dev/{name}")


def _bind(source: str, target: str, *, is_writable: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):  # else a mount already has a file there, which must not change
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    result = _LIBC.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    if is_writable:
        _check(result, f"mount {source}")
    elif result == 0:  # else this user cannot enter the folder
        flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | os.statvfs(target).f_flag & (_MS_NOSUID_NODEV | _MS_NOEXEC)
        _LIBC.mount(None, os.fsencode(target), None, flags, None)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _init(job: dict[str, Any], missing: list[str], has_namespaces: bool) -> NoReturn:
    """Run the program, report how it ended, and exit."""
    if job["root"]:
        try:
            # A mount of another user namespace is locked, and cannot become the root, so mount it again.
            _check(_LIBC.mount(b".", b"proc", None, _MS_BIND | _MS_REC, None), "mount")
            os.chdir("proc")
            # While the host's is visible; it shows this process's PID namespace.
            _check(_LIBC.mount(b"proc", b"proc", b"proc", _MS_NOSUID_NODEV | _MS_NOEXEC, None), "mount proc")
            _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
            _check(_LIBC.umount2(b".", _MNT_DETACH), "umount")
            os.chdir("/")
        except OSError as error:
            _report(job, unsupported=str(error))
            os._exit(1)
    start_read, start_write = os.pipe()
    program = os.fork()
    if program == 0:
        os.close(start_read)
        _run_program(job, missing, has_namespaces, start_write)
    os.close(start_write)
    with os.fdopen(start_read) as start:
        lacking = start.read()
    _report(job, missing=lacking.split() if lacking else None)
    status = None
    while status is None:
        pid, ended = os.wait()
        status = ended if pid == program else None
    _report(job, returncode=os.waitstatus_to_exitcode(status))
    os._exit(0)


def _report(job: dict[str, Any], **values: object) -> None:
    os.write(job["report"], f"{values!r}\n".encode(errors="backslashreplace"))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _run_program(job: dict[str, Any], missing: list[str], has_namespaces: bool, start: int) -> NoReturn:
    os.close(job["report"])
    os.chdir(job["root"]["cwd"] if job["root"] else job["folder"])
    for name, text in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        _write(name, text)
    if job["stdin"] is not None:
        os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    os.closerange(3, start)
    os.closerange(start + 1, 256)
    os.setsid()
    _set_limits(job["limits"], has_namespaces)
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    readable, writable = (["/"], [*job["root"]["mounts"]]) if job["root"] else (job["readable"], [job["folder"]])
    if not _restrict_files(readable, writable):
        missing.append("files")
    if not _filter_system_calls(has_namespaces) and not has_namespaces:
        missing.append("network")
    if not job["root"]:  # whose user is root in its own file system
        _drop_capabilities()
    os.write(start, (" ".join(missing) + "\n").encode())
    os.close(start)
    if job["python"]:
        arguments, env, is_isolated = job["arguments"], job["env"], job["isolated"]
        job.clear()  # the code could find it in the variables of its callers
        python_program.run(arguments, env, is_isolated=is_isolated)
    try:
        os.execvpe(job["arguments"][0], job["arguments"], job["env"])
    except OSError as error:
        os.write(2, f"{job['arguments'][0]}: {error.strerror}\n".encode())
        os._exit(127)


def _drop_capabilities() -> None:
    """Give up all capabilities, also those that root's programs get at their start."""
    if sys.platform != "linux":
        return
    # Without this, a program of root would gain capabilities, and the kernel would take its user away instead.
    if _LIBC.prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT_LOCKED, 0, 0, 0) == 0 or os.geteuid() != 0:
        header, none = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), bytes(24)
        _LIBC.capset(header, none)
    _LIBC.prctl(_PR_SET_DUMPABLE, 1)  # its memory can be measured


def _set_limits(limits: dict[str, int], has_namespaces: bool) -> None:
    values = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file_size"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if has_namespaces:  # where the limit counts the processes of this sandbox only
        values[resource.RLIMIT_NPROC] = limits["processes"]
    elif sys.platform == "linux":
        count = 0
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{process}").st_uid in (os.getresuid()[0], os.geteuid()):
                    count += len(os.listdir(f"/proc/{process}/task"))
            except OSError:  # it has ended
                pass
        values[resource.RLIMIT_NPROC] = limits["processes"] + count
    for name, value in values.items():
        _, hard = resource.getrlimit(name)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (limit, limit))


def _restrict_files(readable: list[str], writable: list[str]) -> bool:
    """Allow reading of `readable`, and everything in `writable`; return whether the kernel has Landlock."""
    if sys.platform != "linux":
        return False
    version = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = _LANDLOCK_RIGHTS[min(version, 3)]
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, struct.pack("=Q", handled), 8, 0)
    rules = [(path, _LANDLOCK_READ) for path in readable]
    rules += [(path, _LANDLOCK_FILE & ~1) for path in _DEVICES]
    for path, rights in [*rules, *((path, handled) for path in writable)]:
        try:
            descriptor = os.open(path, 0o10000000 | os.O_CLOEXEC)  # O_PATH
        except OSError:
            continue
        allowed = rights & handled & (-1 if os.path.isdir(path) else _LANDLOCK_FILE)
        _LIBC.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    restricted = bool(_LIBC.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0)
    os.close(ruleset)
    return restricted


def _filter_system_calls(has_namespaces: bool) -> bool:
    """Let sockets and access to other processes fail with EPERM; return whether the kernel has seccomp filters."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _DENIED:
        return False
    architecture, always_denied = _DENIED[machine]
    denied = always_denied if has_namespaces else (*always_denied, *_SIGNALS[machine])
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, _SECCOMP_KILL),
        (load, 0, 0, 0),
        (at_least, 0, 1, _X32),
        (answer, 0, 0, _SECCOMP_KILL),
    ]
    for number in denied:
        program += [(equal, 0, 1, number), (answer, 0, 0, _SECCOMP_EPERM)]
    program.append((answer, 0, 0, _SECCOMP_ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    return bool(_LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(filter_), 0, 0) == 0)


def _kill_descendants() -> int:
    """Kill the remaining processes of the program, which this process has adopted, and return the exit code."""
    for _ in range(1000):
        children = []
        try:
            for thread in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{thread}/children", "rb") as file:
                    children += [int(word) for word in file.read().split()]
        except FileNotFoundError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
            break
        if not children:
            break
        for child in children:
            os.kill(child, SIGKILL)
            os.waitpid(child, 0)
    return 0
