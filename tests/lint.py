"""What the check_*.py programs share: their command line, and trees with planted faults for their self-tests."""
import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def planted_tree(files):
    """A temporary folder that holds these files (path -> text)."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = os.path.join(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        yield root


def main(name, check_tree, self_test):
    """`check_NAME.py [ROOT]` or `--self-test`: exit code 1 when something is wrong or nothing was checked.

    check_tree(root) -> (problems, number of files that were looked at).
    """
    if "--self-test" in sys.argv[1:]:
        return self_test()
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    problems, count = check_tree(root)
    for problem in problems:
        print(problem)
    print(f"{name}: {count} files, {len(problems)} violations")
    return 1 if problems or count == 0 else 0
