"""Tests of the package: its declarations, and the programs in its documents."""

import subprocess
import sys

import rtrs
from conftest import LONG, MIB, ROOT, pattern
from rtrs._library import declarations, ffi, lib

HEADER = (ROOT / "rtrs-client/capi/include/rtrs.h").read_text()


def run_program(*words):
    """Runs a Python program to completion."""
    words = [sys.executable, *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=LONG, check=False)


def test_the_declarations_match_the_library():
    copy = ROOT / "rtrs-client/python/rtrs/rtrs.h"
    assert copy.read_text() == HEADER, f"copy rtrs-client/capi/include/rtrs.h to {copy}"
    starts = ("int rtrs_", "void rtrs_", "const char *rtrs_")
    lines = [line for line in HEADER.splitlines() if line.startswith(starts)]
    names = [line.split("(")[0].split()[-1].lstrip("*") for line in lines]
    assert len(names) > 25
    for name in names:
        assert getattr(lib, name)
    sizes = {"geometry": 32, "event": 256, "completion": 24, "extent": 16}
    assert {name: ffi.sizeof(f"struct rtrs_{name}") for name in sizes} == sizes


def test_directives_are_not_declarations():
    text = '#ifdef __cplusplus\nextern "C" {\n#endif\nint f(void);\n#define A 1\n'
    assert declarations(text).split() == ["int", "f(void);"]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("RTRS_LIBRARY", "/nowhere/librtrs.so.0")
    done = run_program("-c", "import rtrs")
    assert done.returncode == 1
    assert "cannot load /nowhere/librtrs.so.0" in done.stderr and "RTRS_LIBRARY" in done.stderr


def test_the_example_copies_a_volume(start_server):
    server = start_server("a=mem:8M", "b=mem:9M", "c=mem:4M")
    with rtrs.Volume.open(server.uri("a")) as volume:
        volume.pwrite(pattern(8 * MIB), 0)
    example = ROOT / "rtrs-client/python/examples/copy_volume.py"
    done = run_program(example, server.uri("a"), server.uri("b"))
    assert (done.returncode, done.stdout) == (0, "copied 8388608 bytes\n"), done.stderr
    assert f"verify [{'#' * 30}]" in done.stderr
    with rtrs.Volume.open(server.uri("b"), access="ro") as volume:
        assert volume.pread(0, 8 * MIB) == pattern(8 * MIB)
    done = run_program(example, server.uri("a"), server.uri("c"))
    assert done.returncode == 1 and "cannot write" in done.stderr


def test_the_program_in_the_document_runs(server):
    blocks = (ROOT / "docs/how-to/embed.md").read_text().split("```\n")
    programs = [block for block in blocks if block.startswith("import asyncio")]
    assert len(programs) == 1
    uri = '"tcp://10.0.0.2/vol0"'
    assert programs[0].count(uri) == 1
    done = run_program("-c", programs[0].replace(uri, repr(server.uri())))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "67108864 bytes\nb'hello' at [4096]\n"


def test_a_program_may_end_with_an_open_volume(server):
    program = f"import rtrs; v = rtrs.Volume.open({server.uri()!r}, retry_for='60s'); v.flush()"
    for _ in range(2):
        done = run_program("-W", "error", "-c", program)
        assert (done.returncode, done.stderr) == (0, "")
