"""Which open runs may enclose a run that names none."""

from __future__ import annotations

from weft.core.program.structure.runs import CodeRuns


def test_a_run_of_another_thread_may_be_inside_an_open_run() -> None:
    """The thread of the open run would have named it. Other handles have nothing to do with it."""
    runs = CodeRuns()
    assert not runs.may_enclose("top", thread=1)
    runs.start("chain", ("top",), thread=1)
    assert not runs.may_enclose("top", thread=1)
    assert runs.may_enclose("top", thread=2)
    assert not runs.may_enclose("branch", thread=2)


def test_a_run_that_has_ended_encloses_nothing() -> None:
    """The last end forgets the thread, and nothing is kept. A run that is not known may end."""
    runs = CodeRuns()
    runs.start("outer", ("top",), thread=1)
    runs.start("inner", ("top",), thread=1)
    runs.end("outer")
    assert runs.may_enclose("top", thread=2)
    runs.end("inner")
    runs.end("inner")
    assert not runs.may_enclose("top", thread=2)
    runs.start("later", ("top",), thread=2)
    assert not runs.may_enclose("top", thread=2)
    assert runs.may_enclose("top", thread=1)
    runs.end("later")
    assert not runs._by_handle
    assert not runs._handles


def test_a_run_of_a_branch_is_one_of_the_handles_around_it() -> None:
    """The handle of the program may be used inside a run of a branch. The branch is not inside those of the program."""
    runs = CodeRuns()
    runs.start("outer", ("top",), thread=1)
    assert not runs.may_enclose("branch", thread=2)
    runs.end("outer")
    runs.start("inner", ("branch", "top"), thread=1)
    assert runs.may_enclose("branch", thread=2)
    assert runs.may_enclose("top", thread=2)
    assert not runs.may_enclose("sibling", thread=2)
    runs.start("inner", ("top",), thread=1)  # reported by another handle as well
    assert runs.may_enclose("branch", thread=2)
    runs.end("inner")
    assert not runs._by_handle
    assert not runs._handles
