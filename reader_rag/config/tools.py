"""When an answer with tools stops calling them."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class ToolConfig(Settings):
    """When an answer with tools stops calling them: beyond a limit, `tool_choice="auto"` gives text."""

    max_repeated_tool_calls: int | None = setting(
        1,
        "How often a call that had the same result before may be repeated since the user's last message; then the "
        "answer is text. None: without limit.",
        ge=1,
    )
    max_tool_rounds: int | None = setting(
        None,
        "Most answers with tool calls to one message of the user; then the answer is text. None: 8 where the model's "
        "chat template knows no tools, else without limit.",
        ge=1,
    )

    def reached(self, calls: list[list[tuple[str, str, str]]], *, trained: bool) -> bool:
        """Whether the next answer is text.

        Args:
            calls: For each answer since the user's last message its calls: tool, arguments and result.
            trained: Whether the model's chat template knows tools.
        """
        rounds = self.max_tool_rounds if self.max_tool_rounds is not None or trained else UNTRAINED_ROUNDS
        if rounds is not None and sum(bool(round_) for round_ in calls) >= rounds:
            return True
        every = [call for round_ in calls for call in round_]
        limit = self.max_repeated_tool_calls
        return limit is not None and any(every.count(call) > limit for call in set(every))


UNTRAINED_ROUNDS = 8
"""`max_tool_rounds` of a model that was not trained on tools: less than half of LlamaIndex's limit for agents."""
