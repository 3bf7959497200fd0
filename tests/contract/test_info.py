"""``python -m memkern info``: what ``memkern.backend.report()`` says, without any extra."""

import json
import re
import subprocess
import sys

import pytest
import torch

from memkern import backend
from memkern.__main__ import main


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(backend.report()))
    blocked = "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'transformers', 'numpy']))"
    code = f"{blocked}; from memkern.__main__ import main; main(['info'])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert torch.__version__ in shown
    for name, state in report["backends"].items():
        text = "yes" if state["available"] else f"no: {state['reason']}"
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE), name
