"""Match an error by the facts in its message, in any order, and not by its wording."""

import re


def naming(*facts: str) -> str:
    """Return the pattern of a message that contains all of these texts.

        with pytest.raises(DeletedError, match=naming("state['w']", "float32[8]")):

    Args:
        facts: Argument paths, names, types, numbers, code to write instead.
    """
    return "".join(rf"(?=[\s\S]*{re.escape(fact)})" for fact in facts)
