"""The demo model's greedy tokens by transformers + torch, for tests/test_demo.py. Runs in the reference environment.

python tools/make_demo_golden.py DEMO_DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch
import transformers

PROMPTS = ("Why is the sky blue?", "Write a short story about a fox and a river.")
NEW_TOKENS = 100
OUT = Path(__file__).parent.parent / "tests" / "goldens" / "demo_greedy.json"


def main(directory: str) -> None:
    """Write prompts and answers of NEW_TOKENS tokens as ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cases = []
    for text in PROMPTS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.inference_mode():
            # The mask is given because transformers would guess one from the padding id, which is this model's end token.
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
            )
        cases.append(
            {"prompt": text, "prompt_ids": prompt[0].tolist(), "token_ids": out[0, prompt.shape[1] :].tolist()}
        )
    peers = {"torch": torch.__version__, "transformers": transformers.__version__}
    OUT.write_text(json.dumps({"peers": peers, "cases": cases}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
