import pytest

from lowprec.kernels import compiled


class Everything:
    def __contains__(self, kernel):
        return True


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(compiled, "unfused", Everything())
