"""Every code block of README and docs says how it is checked, and few are only shown."""

from __future__ import annotations

import json

import pytest
from doc_blocks import LANGUAGES, Block, all_blocks, blocks_of, free_names


def test_every_block_has_a_tag_and_a_language() -> None:
    wrong = [b.place for b in all_blocks() if not b.tag or b.language not in LANGUAGES]
    assert wrong == [], "put <!-- run -->, <!-- types-only --> or <!-- shown: reason --> in the line before the fence"


def test_at_most_a_tenth_is_only_shown() -> None:
    shown = [block.place for block in all_blocks() if block.tag == "shown"]
    assert len(shown) <= len(all_blocks()) / 10, shown


def test_text_is_only_shown() -> None:
    assert [b.place for b in all_blocks() if b.language == "text" and b.tag != "shown"] == []


@pytest.mark.parametrize("block", [b for b in all_blocks() if b.language == "json"], ids=lambda block: block.place)
def test_json_is_valid(block: Block) -> None:
    json.loads(block.text)


def test_blocks_are_found_with_their_tags() -> None:
    page = (
        'A `word`.\n\n<!-- run -->\n```python title="app.py"\nx = 1\n```\n\n```bash\nls\n```\n'
        "<!-- shown: a drawing -->\n```text\n--\n```\n- in a list\n\n  <!-- types-only -->\n  ```json\n  {}\n  ```\n"
    )
    assert list(blocks_of(page, "p.md")) == [
        Block("p.md", 4, "python", "run", "", "app.py", "x = 1\n"),
        Block("p.md", 8, "bash", "", "", "", "ls\n"),
        Block("p.md", 12, "text", "shown", "a drawing", "", "--\n"),
        Block("p.md", 18, "json", "types-only", "", "", "  {}\n"),
    ]


def test_names_that_a_program_does_not_bind() -> None:
    code = "import a.b\nfor x in xs:\n    print(x, a, lambda y: y + z)\ntry:\n    f()\nexcept OSError as e:\n    e\n"
    assert free_names(code) == {"xs", "z", "f"}
