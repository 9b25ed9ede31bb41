"""README's client code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_screen_of_client_code_runs(server, capsys) -> None:
    """What a reader copies works against a real server, and the second answer reuses the first turn's cache."""
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    text = code[1].replace("127.0.0.1:50051", server.target)
    exec(compile(text, "README.md", "exec"), {})  # noqa: S102 - it is our own
    shown = capsys.readouterr().out
    reused = re.search(r"(\d+) computed, (\d+) reused", shown)
    assert reused is not None
    assert int(reused[2]) > int(reused[1])
    assert "the ledger is at" in shown
