"""Golden files of the messages: one per topic in `messages/`, one section per mistake."""

import re
from functools import cache
from pathlib import Path

from tests.errors.catalogue import Mistake, Topic, wrapped
from tests.errors.running import ours
from tests.goldens import join_sections

FOLDER = Path(__file__).parent / "messages"


def message(mistake: Mistake) -> str:
    """Run the wrong call of an entry and return `Class: text`, wrapped."""
    outcome = ours(mistake)
    return wrapped(f"{outcome.kind}: {outcome.text}")


@cache
def read_messages(topic: str) -> dict[str, str]:
    """Return the golden messages of one topic by the titles of its mistakes."""
    path = FOLDER / f"{topic}.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(sections[1::2], (s.strip("\n") for s in sections[2::2]), strict=True))


def write_message(topic: Topic, mistake: Mistake) -> None:
    """Replace one message in the golden file of its topic, and drop those without an entry."""
    kept = read_messages(topic.name) | {mistake.title: message(mistake)}
    titles = [each.title for each in topic.mistakes if each.title in kept]
    FOLDER.mkdir(exist_ok=True)
    text = join_sections({title: kept[title] for title in titles})
    (FOLDER / f"{topic.name}.txt").write_text(text.rstrip() + "\n", encoding="utf-8")
    read_messages.cache_clear()
