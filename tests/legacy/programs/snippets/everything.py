"""Runs the other files of this folder one after another, as programs."""

import pathlib
import runpy
import sys

HERE = pathlib.Path(__file__)


def main():
    names = sys.argv[1:] or sorted(p.stem for p in HERE.parent.glob("*.py") if p != HERE)
    for name in names:
        sys.argv = [str(HERE.with_name(f"{name}.py"))]
        runpy.run_path(sys.argv[0], run_name="__main__")
        print("ran", name, flush=True)


if __name__ == "__main__":
    main()
