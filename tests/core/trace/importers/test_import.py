"""What holds for the import of every format: files are found, formats recognised, caps obeyed, ids unique."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_samples import SAMPLES

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram, dump, parse, read, write
from weft.core.trace.importers import IMPORTERS, ImportOptions, TraceImport
from weft.core.trace.importers.contract import Blocks

Weft = Callable[..., tuple[int, str, str]]


def weka(path: Path, *tokens: tuple[int, int], gaps_s: tuple[float, ...] = (), name: str = "s") -> Path:
    """Write a session whose calls have these tokens of prompts and outputs."""
    gaps = itertools.chain(gaps_s, itertools.repeat(1.0))
    requests = [
        {"t": at_s, "type": "n", "in": prompt, "out": output, "hash_ids": [], "api_time": 0.0, "think_time": gap_s}
        for at_s, ((prompt, output), gap_s) in enumerate(zip(tokens, gaps, strict=False))
    ]
    path.write_text(json.dumps({"id": name, "block_size": 4, "requests": requests}))
    return path


def lengths(programs: list[TraceProgram]) -> list[int]:
    return [call.prompt_tokens for program in programs for call in program.calls]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 20, 30, 15]),
        ({"max_context_tokens": 31}, [10, 20]),
        ({"max_context_tokens": 32}, [10, 20, 30, 15]),
        ({"max_turns": 3}, [10, 20, 30]),
    ],
)
def test_calls_beyond_a_cap_and_those_after_them_are_left_out(
    options: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    """A short call after a long one goes too, because its prompt would come from nowhere."""
    path = weka(tmp_path / "a.json", (10, 2), (20, 2), (30, 2), (15, 2))
    found = TraceImport([path], ImportOptions(**options))
    assert lengths(list(found)) == kept
    counts = found.counts
    assert (counts.programs, counts.calls, counts.calls_left_out) == (1, len(kept), 4 - len(kept))


def test_a_program_whose_first_call_is_beyond_a_cap_is_left_out(tmp_path: Path) -> None:
    """If none is left, the import fails."""
    paths = [weka(tmp_path / "a.json", (10, 2)), weka(tmp_path / "b.json", (99, 2))]
    found = TraceImport(paths, ImportOptions(max_context_tokens=50))
    assert lengths(list(found)) == [10]
    assert (found.counts.programs, found.counts.programs_left_out) == (1, 1)
    with pytest.raises(TraceError, match="the first calls of all 2 programs have more than 5 tokens"):
        list(TraceImport(paths, ImportOptions(max_context_tokens=5)))


def test_a_long_gap_is_cut(tmp_path: Path) -> None:
    """A short one stays, and so does the recorded time."""
    path = weka(tmp_path / "a.json", (1, 1), (2, 1), (3, 1), gaps_s=(0, 100, 5))
    (program,) = TraceImport([path], ImportOptions(gap_cap_s=60))
    assert [call.gap_s for call in program.calls] == [0, 60, 5]
    assert [call.at_s for call in program.calls] == [0, 1, 2]


def test_ids_of_several_files_are_unique(tmp_path: Path) -> None:
    """A file writes its sessions' ids without knowing those of others. Here the id that a second one would get is
    taken too."""
    names = ["s", "s-2", "s", "s", "s-2"]
    paths = [weka(tmp_path / f"{number}.json", (1, 1), name=name) for number, name in enumerate(names)]
    found = [program.program for program in TraceImport(paths)]
    assert found[:2] == ["s", "s-2"]
    assert len(set(found)) == 5
    write(TraceImport(paths), tmp_path / "out.jsonl")
    assert [program.program for program in read(tmp_path / "out.jsonl")] == found


def test_ends_may_be_unknown(tmp_path: Path) -> None:
    """The option says it of all programs."""
    path = weka(tmp_path / "a.json", (1, 1))
    ends = [next(iter(TraceImport([path], ImportOptions(ends_unknown=each)))).end_known for each in (False, True)]
    assert ends == [True, False]


def test_a_folder_may_have_other_files(tmp_path: Path) -> None:
    """They are left out and listed. Folders in it are read too."""
    (tmp_path / "inner").mkdir()
    weka(tmp_path / "inner" / "a.json", (1, 1), name="a")
    weka(tmp_path / "b.json", (1, 1), name="b")
    (tmp_path / "README.md").write_text("Sessions")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    found = TraceImport([tmp_path])
    assert [path.name for path in found.left_out] == ["README.md", "picture.png"]
    assert [program.program for program in found] == ["b", "a"]


def test_programs_come_one_by_one(tmp_path: Path) -> None:
    """The second file is not read before the first one's program was taken."""
    paths = [weka(tmp_path / f"{number}.json", (1, 1)) for number in range(2)]
    found = TraceImport(paths)
    taken: list[int] = []
    found.advance = taken.append
    programs = iter(found)
    next(programs)
    assert sum(taken) == paths[0].stat().st_size
    next(programs)
    assert sum(taken) == found.bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hello", r"in\.json is in no known format; it begins with 'Hello'.*weka"),
        ("", r"in\.json is empty\. Name a file with traces"),
        ("{}", "no known format"),
        ('{"version": 3, "program": "A", "calls": []}', r"in\.json is a program trace already; give it to weft sim"),
        ("[" * 100_000, "no known format"),
    ],
)
def test_a_file_of_no_known_format_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The error names the file and, of one with content, what it begins with and the formats."""
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        list(TraceImport([tmp_path / "in.json"]))


@pytest.mark.parametrize("name", [None, "mooncake"])
def test_a_pipe_is_refused(name: str | None, tmp_path: Path) -> None:
    """What looks at it first would take its beginning away, and a pipe that nobody writes would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"pipe is a pipe or a device.*write it to a file first"):
        TraceImport([tmp_path / "pipe"], format=name)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """A file, a folder without traces, a format."""
    with pytest.raises(TraceError, match=r"none\.json cannot be read: No such file"):
        list(TraceImport([tmp_path / "none.json"]))
    with pytest.raises(TraceError, match="has no file in a known format"):
        list(TraceImport([tmp_path]))
    with pytest.raises(TraceError, match=r"there is no format 'excel'; choose one of .*weka"):
        list(TraceImport([tmp_path], format="excel"))


@pytest.mark.parametrize("name", IMPORTERS)
def test_every_format_is_found_by_looking(name: str, tmp_path: Path) -> None:
    """Its sample is imported with and without the name of the format, also from a folder, and is a valid trace."""
    for file, data in SAMPLES[name].items():
        (tmp_path / file).write_bytes(data)
    path = tmp_path / next(iter(SAMPLES[name]))
    ((_, importer),) = TraceImport([path]).files
    assert importer.name == name
    programs = list(TraceImport([path]))
    assert programs == list(TraceImport([path], format=name)) == list(TraceImport([tmp_path]))
    assert [parse(dump(program), "here") for program in programs] == programs
    assert programs


@pytest.mark.parametrize("data", [b'{"id": "\xff"}', b"\xff\xfe{", b'{"id"', b"[" * 100_000, b"1" * 5000, b"", b"null"])
@pytest.mark.parametrize("name", IMPORTERS)
def test_every_format_refuses_what_it_cannot_read(name: str, data: bytes, tmp_path: Path) -> None:
    """With its name given too, so that nothing looks at the file first."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"in\.jsonl") as raised:
        list(TraceImport([path], format=name))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(("options", "message"), [({"max_turns": 0}, "max_turns is 0"), ({"gap_cap_s": -1}, "is -1")])
def test_a_cap_that_caps_everything_is_refused(options: dict[str, Any], message: str) -> None:
    """It would import nothing."""
    with pytest.raises(TraceError, match=message):
        ImportOptions(**options)


def test_blocks_are_the_same_if_all_before_them_are() -> None:
    """Ids of formats that say only what is in a block mean the same tokens, and not the same prefix."""
    scope = Blocks().scope()
    first, second, third = scope.numbers(["a", "b"]), scope.numbers(["c", "b"]), scope.numbers(["a", "b", "b"])
    assert first == third[:2]
    assert len({*first, *second, third[2]}) == 5


# -- the command


def test_the_command_writes_a_trace(weft: Weft, tmp_path: Path) -> None:
    """It says what it has written, and what the caps and the formats left out."""
    folder, out = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    for name, tokens in (("a", (10, 20, 99)), ("b", (5,)), ("c", (99,))):
        weka(folder / f"{name}.json", *((each, 1) for each in tokens), name=name)
    (folder / "notes.txt").write_text("Hello")
    code, printed, err = weft("trace", "import", folder, "--out", out, "--max-context", 50, "--rate", 0.5)
    assert (code, err) == (0, "")
    assert printed.splitlines() == [
        f"{out}: 2 programs with 3 calls",
        "left out by the caps: 1 program, 1 call of other programs",
        f"left out as no known format: 1 file (the first is {folder / 'notes.txt'})",
    ]
    programs = read(out)
    assert [program.program for program in programs] == ["a", "b"]
    assert 0 < programs[0].arrival_s < programs[1].arrival_s
    code, printed, _ = weft("trace", "import", folder, "--out", out, "--programs", 1, "--format", "weka")
    assert (code, printed.splitlines()[0]) == (0, f"{out}: 1 program with 3 calls")
    assert "notes.txt" in printed.splitlines()[1], "a format that is named does not make other files of the folder so"


def test_nothing_is_half_written(weft: Weft, tmp_path: Path) -> None:
    """If a later file is wrong, the old trace stays, and no other file is left behind."""
    weka(tmp_path / "a.json", (1, 1))
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    (tmp_path / "b.json").write_text('{"id": "b", "block_size": 4, "requests": [{"hash_ids": [], "in": 1}]}')
    code, printed, err = weft("trace", "import", tmp_path / "a.json", tmp_path / "b.json", "--out", out)
    assert (code, printed) == (1, "")
    assert err.count("\n") == 1
    assert "b.json, line 1, request 1: t is None" in err
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json", "out.jsonl"}


def test_a_file_to_import_is_not_written_over(weft: Weft, tmp_path: Path) -> None:
    """Its name may be that which a trace has without `--out`; nor is it replaced through a link."""
    path = weka(tmp_path / "trace.jsonl", (1, 1))
    (tmp_path / "link").symlink_to(path)
    before = path.read_text()
    for out in (path, tmp_path / "link"):
        code, _, err = weft("trace", "import", tmp_path, "--out", out)
        assert code == 1
        assert "is one of the files to read, and would be replaced; give another --out." in err
    assert path.read_text() == before


def test_a_new_trace_is_made_as_the_user_makes_files(tmp_path: Path) -> None:
    """With the rights that the user's files get, and through a link to where it leads."""
    plain, link, target = tmp_path / "plain", tmp_path / "link", tmp_path / "target"
    plain.write_text("")
    target.write_text("")
    target.chmod(0o600)
    link.symlink_to(target)
    for out in (tmp_path / "new", link):
        write(TraceImport([weka(tmp_path / "a.json", (1, 1))]), out)
    assert (tmp_path / "new").stat().st_mode == plain.stat().st_mode
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert read(target)
    with pytest.raises(TraceError, match="cannot be written"):
        write([], tmp_path / "none" / "out")
