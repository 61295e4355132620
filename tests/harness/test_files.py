"""A file is whole or not there, and the error says what really happened."""

import errno

import pytest
import torch

from harness.files import write_atomically
from lowprec.errors import Refused

INTERRUPTS = {
    "reader": lambda: RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed."),
    "signal": lambda: KeyboardInterrupt(15),
}
STATE = {"weight": torch.ones(40, 1000), "bias": torch.zeros(1000)}


def failing(error, at):
    """A write of STATE by torch.save whose `at`-th piece raises `error`, as a signal's handler or a full disk
    would.
    """

    def write(file):
        pieces = iter(range(1, 10**6))

        class Disk:
            flush = staticmethod(file.flush)

            def write(self, data):
                if next(pieces) == at:
                    raise error
                return file.write(data)

        torch.save(STATE, Disk())

    return write


@pytest.fixture
def path(tmp_path):
    (tmp_path / "checkpoint.pt").write_text("before")
    return tmp_path / "checkpoint.pt"


# torch ends its zip file on the way out, and raises a second error over the first at most of these
@pytest.mark.parametrize("at", [1, 3, 8, 16])
@pytest.mark.parametrize("kind", INTERRUPTS)
def test_what_interrupts_a_write_is_raised_itself(kind, at, path):
    error = INTERRUPTS[kind]()
    with pytest.raises(type(error)) as raised:
        write_atomically(path, failing(error, at))
    assert raised.value is error
    assert [p.read_text() for p in path.parent.iterdir()] == ["before"]


@pytest.mark.parametrize("at", [1, 3, 8, 16])
def test_a_full_disk_is_named(at, path):
    with pytest.raises(Refused, match="no space left on the device; the one written before is whole"):
        write_atomically(path, failing(OSError(errno.ENOSPC, "No space left on device"), at))
    assert [p.read_text() for p in path.parent.iterdir()] == ["before"]


def test_an_error_that_is_being_handled_is_no_cause(path):
    with pytest.raises(Refused, match="can't write .*: Input/output error"):
        try:
            raise INTERRUPTS["reader"]()
        except RuntimeError:
            write_atomically(path, failing(OSError(errno.EIO, "Input/output error"), 3))


def test_a_link_is_not_replaced_by_a_file(path):
    link = path.with_name("link")
    link.symlink_to("/dev/null")
    with pytest.raises(Refused, match="a link stands there"):
        write_atomically(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
