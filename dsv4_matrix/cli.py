"""The ``dsv4-matrix`` command."""


def main() -> int:
    raise SystemExit("not built yet")
