"""Tasks that meet: what is asked at the same time is answered together, in order, and nobody waits for ever."""

from collections.abc import Sequence

import pytest

from bcfl.client.meeting import Meeting


def squares(log: list[list[int]]) -> Meeting[int]:
    """A meeting of three that answers with squares and notes what it was asked at once."""

    def answer(questions: Sequence[int]) -> list[int]:
        log.append(list(questions))
        return [q * q for q in questions]

    return Meeting(answer, 3)


def test_what_is_asked_at_the_same_time_is_answered_together() -> None:
    log: list[list[int]] = []
    meeting = squares(log)

    def task(i: int) -> int:  # task i asks i times
        return sum(meeting.ask(10 * i + n) for n in range(i))

    results = list(meeting.stream(lambda i=i: task(i) for i in (0, 2, 1, 3)))
    meeting.close()
    assert results == [0, 20**2 + 21**2, 10**2, 30**2 + 31**2 + 32**2]
    assert log == [[20, 10], [21], [30], [31], [32]]  # of three at a time, in their order


def test_a_task_that_fails_does_not_stop_the_others_of_its_group() -> None:
    log: list[list[int]] = []
    meeting = squares(log)

    def task(i: int) -> int:
        square: int = meeting.ask(i)
        if i == 1:
            raise KeyError("mine")
        return square + int(meeting.ask(i + 10))

    with pytest.raises(KeyError, match="mine"):
        list(meeting.stream(lambda i=i: task(i) for i in range(3)))
    assert log == [[0, 1, 2], [10, 12]]
    assert list(meeting.stream([lambda: task(2)])) == [4 + 144]
    meeting.close()


@pytest.mark.parametrize("error", [ValueError("no answer"), KeyboardInterrupt()])
def test_if_there_is_no_answer_all_tasks_end(error: BaseException) -> None:
    ended = []

    def answer(questions: Sequence[int]) -> list[int]:
        raise error

    meeting = Meeting(answer, 3)

    def task(i: int) -> int:
        try:
            return int(meeting.ask(i))
        finally:
            ended.append(i)

    with pytest.raises(type(error)):
        list(meeting.stream(lambda i=i: task(i) for i in range(5)))
    meeting.close()  # would hang if one of them still waited
    assert sorted(ended) == [0, 1, 2]
