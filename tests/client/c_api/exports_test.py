#!/usr/bin/env python3
"""What libkvmill.so shows and needs: exactly the functions of client/kvmill.h, and no library that it carries inside.

exports_test.py LIBRARY HEADER
"""
import re
import subprocess
import sys


def lines_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main():
    library, header = sys.argv[1:]
    with open(header, encoding="utf-8") as file:
        text = file.read()
    declared = re.findall(r"^KVMILL_API [^;(]*?(\w+)\(", text, re.MULTILINE)
    if len(declared) < 30 or len(set(declared)) != len(declared):
        sys.exit(f"{header}: {len(declared)} functions were found, which cannot be right")
    exported = {line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", library)}
    wrong = [f"{name} is visible and not in the header" for name in sorted(exported - set(declared))]
    wrong += [f"{name} is in the header and not visible" for name in sorted(set(declared) - exported)]
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
