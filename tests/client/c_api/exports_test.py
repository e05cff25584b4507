#!/usr/bin/env python3
"""What libkvmill.so shows and needs: exactly the functions of its headers, and no library that it carries inside.

exports_test.py LIBRARY HEADER...
"""
import re
import subprocess
import sys


def lines_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main():
    library, *headers = sys.argv[1:]
    declared = []
    for header in headers:
        with open(header, encoding="utf-8") as file:
            found = re.findall(r"^KVMILL_API [^;(]*?(\w+)\(", file.read(), re.MULTILINE)
        if len(found) < 3:
            sys.exit(f"{header}: {len(found)} functions were found, which cannot be right")
        declared += found
    if len(declared) < 50 or len(set(declared)) != len(declared):
        sys.exit(f"{len(declared)} functions were found, which cannot be right")
    exported = {line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", library)}
    wrong = [f"{name} is visible and in no header" for name in sorted(exported - set(declared))]
    wrong += [f"{name} is in a header and not visible" for name in sorted(set(declared) - exported)]
    needed = [match.group(1) for match in re.finditer(r"NEEDED.*\[(.*?)\]", "\n".join(lines_of("readelf", "-d", library)))]
    wrong += [f"{name} must be inside, not beside" for name in needed if re.match(r"lib(grpc|gpr|upb|proto|spdlog|fmt)", name)]
    undefined = "\n".join(lines_of("nm", "-DC", "--undefined-only", library))
    wrong += [f"undefined: {name}" for name in re.findall(r"U ((?:google|grpc|spdlog|fmt)\S*::.*)", undefined)]
    if "NODELETE" not in "\n".join(lines_of("readelf", "-d", library)):
        wrong.append("dlclose() would unload it under its threads")
    print("\n".join(wrong) or f"{len(exported)} functions, all of them declared; {len(needed)} libraries beside it")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
