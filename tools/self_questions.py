"""Questions that the demo model asks itself, to train drafters on: python tools/self_questions.py OUTPUT [--count N] [--seed N].

A chat model that sees only the head of a user's message writes the message (Magpie, arXiv 2406.08464, section 2.1), so training data can
leave one domain without a dataset. The lines are `{"prompt": ...}`, questions for `jaxspec.train --write-answers`.
"""

import json
import sys

from jaxspec import demo
from jaxspec.cli import Parser, run, writable
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.errors import InputError
from jaxspec.prompts import apply_chat
from jaxspec.tokenizer import Tokenizer

# Systems under which the questions are written: None is the model's own, the others lead it elsewhere. Only the question is kept.
SYSTEMS = (
    None,
    "You answer questions about science, history, geography, health, money and everyday life.",
    "You write what people ask for: stories, poems, emails, essays, speeches and reviews.",
    "You write Python functions from their descriptions.",
    "You summarise, translate and rewrite the texts that people give you.",
)
MARK = "@@question@@"
TEMPERATURE = 0.8
SHORTEST, LONGEST = 6, 100  # tokens of a question
ROWS = 32


def main(argv: list[str]) -> None:
    parser = Parser("self_questions", "Questions that the demo model asks itself.")
    parser.add_argument("output", metavar="OUTPUT", help="file of JSON lines to write")
    parser.add_argument(
        "--count", type=int, default=1700, metavar="N", help="questions asked for; fewer are kept (default 1700)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other questions with another (default 0)")
    arguments = parser.parse_args(argv)
    if arguments.count < 1:
        raise InputError(f"--count is {arguments.count}; it must be at least 1")
    if not 0 <= arguments.seed < 2**32:
        raise InputError(f"--seed is {arguments.seed}; it must be from 0 to 2**32 - 1")
    output = writable("OUTPUT", arguments.output)
    if output.stat().st_size:
        raise InputError(f"OUTPUT {output}: holds something already; name a new file")
    engine = Engine.from_pretrained(demo.ensure(), max_batch_size=ROWS)
    tokenizer = engine.tokenizer
    assert tokenizer is not None  # the demo model has one
    heads = [_head(tokenizer, system) for system in SYSTEMS]
    params = SamplingParams(max_new_tokens=LONGEST, temperature=TEMPERATURE)
    seeds = [(arguments.seed << 32) + index for index in range(arguments.count)]
    prompts = [heads[index % len(heads)] for index in range(arguments.count)]
    kept: set[str] = set()
    with output.open("w", encoding="utf-8") as file:
        for answer in engine.generate_refilled(prompts, params, seeds, ROWS):
            text = tokenizer.decode(answer.token_ids[:-1]).strip()
            if answer.finish_reason == "stop" and len(answer.token_ids) > SHORTEST and text not in kept:
                kept.add(text)
                file.write(json.dumps({"prompt": text}) + "\n")
                file.flush()
    print(f"{len(kept)} of {arguments.count} questions kept", file=sys.stderr)


def _head(tokenizer: Tokenizer, system: str | None) -> list[int]:
    """Token ids of a conversation up to where the user's message begins."""
    (item,) = apply_chat([{"prompt": MARK}], True, system)
    text = tokenizer.render_chat(item["messages"])
    return tokenizer.encode_rendered(text[: text.index(MARK)])


if __name__ == "__main__":
    sys.exit(run("self_questions", main))
