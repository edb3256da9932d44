"""Runs inside the official evaluator's environment: registers one model, then calls its CLI.

    python -P official_driver.py REPOSITORY RESULT_DIR SCORE_DIR MODEL SPLIT STYLE

A result is the model's text or, where tools were shown under other names, an object with the
`text` and the data's `names` by shown name.

Of this repository it imports only the parsers of tool calls, which need nothing installed.
"""

from __future__ import annotations

import sys
from typing import Any


def main(
    repository: str, result_dir: str, score_dir: str, model: str, split: str, style: str
) -> None:
    """Evaluate one model on one split with the official command line."""
    sys.path.append(repository)  # last, so that nothing of it shadows an installed package
    from bfcl_eval.__main__ import cli
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
    from bfcl_eval.model_handler.base_handler import BaseHandler

    from gatewright.python_calls import parse_answer

    class DecodingHandler(BaseHandler):
        """Turns our result text into calls; it is never asked to generate."""

        def decode_ast(
            self, result: Any, language: Any = None, has_tool_call_tag: bool = False
        ) -> list[dict[str, Any]]:
            shown = result if isinstance(result, dict) else {"text": result, "names": {}}
            parsed = parse_answer(shown["text"], style)
            if parsed.kind == "unparseable":
                raise ValueError(parsed.error)
            return [{shown["names"].get(c.name, c.name): c.arguments} for c in parsed.calls]

    MODEL_CONFIG_MAPPING[model] = ModelConfig(
        model_name=model,
        display_name=model,
        url="",
        org="",
        license="",
        model_handler=DecodingHandler,
    )
    flags = ["--model", model, "--test-category", split]
    cli(
        ["evaluate", *flags, "--result-dir", result_dir, "--score-dir", score_dir, "--partial-eval"]
    )


if __name__ == "__main__":
    if len(sys.argv) != 7:
        asked = bool({"-h", "--help"} & set(sys.argv))
        said = "eval_bfcl.score --official runs this file in an environment of its own; run that"
        print(said, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    main(*sys.argv[1:])
