from cli import stepped  # noqa: F401 - for tests that ask for them
from generating import digits, teachers  # noqa: F401
