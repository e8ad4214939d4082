"""`python -m jaxspec.generate`: what it prints, where, and with which exit code."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import byte_tokenizer, write_model

from jaxspec.cli import BAD_INPUT, INTERNAL, INTERRUPTED, one_line, run
from jaxspec.decoding.programs import Programs
from jaxspec.generate import NAME, main
from jaxspec.prompts import apply_chat, read_prompt_file

SHORT = ["--max-new-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A chat model in a directory with a space in its name."""
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny chat"))


def generate(*argv: str) -> int:
    return run(NAME, main, list(argv))


def test_json_is_one_object_a_prompt_in_input_order(model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": "Hi \u2028 there"}]}, {"prompt_ids": [5, 6]}, {"prompt": "abc"}]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    argv = ["--model", model, "A longer first prompt", "--prompt-ids", "1,2,3", "--prompt-file", str(file)]
    assert generate(*argv, *SHORT, "--output", "json", "--no-chat", "--stats") == 0
    out, err = capsys.readouterr()
    objects = [json.loads(line) for line in out.split("\n")[:-1]]
    encode = byte_tokenizer().encode
    prompts = [
        encode("A longer first prompt"),
        [1, 2, 3],
        encode("<|user|>Hi \u2028 there<|end|><|assistant|>"),
        [5, 6],
        encode("abc"),
    ]
    assert [item["prompt_ids"] for item in objects] == prompts
    for item, prompt in zip(objects, prompts, strict=True):
        assert list(item) == ["prompt_ids", "token_ids", "text", "finish_reason", "usage", "speculative", "timing"]
        assert len(item["token_ids"]) == 6 and item["finish_reason"] == "length" and item["speculative"] is None
        assert item["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 6}
        assert list(item["timing"]) == ["load_s", "compile_s", "prefill_s", "decode_s", "tokens_per_s"]
    assert [line.split()[0] for line in err.splitlines()] == ["load", "compile", "prefill", "decode"]
    assert "30 tokens" in err and "tokens/s" in err


def test_streamed_text_equals_text_and_chat_is_on_by_default(model, capsys):
    argv = ["--model", model, "Hello", *SHORT, "--system", "Be short", "--temperature", "1", "--seed", "3"]
    assert generate(*argv) == 0
    text = capsys.readouterr().out
    assert generate(*argv, "--stream") == 0
    assert capsys.readouterr() == (text, "")
    assert generate(*argv, "--output", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] + "\n" == text
    assert answer["prompt_ids"] == byte_tokenizer().encode("<|system|>Be short<|end|><|user|>Hello<|end|><|assistant|>")


def test_stdin_is_the_prompt_where_there_is_no_other(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("h\u00e9\n".encode())))
    assert generate("--model", model, *SHORT, "--no-chat", "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == byte_tokenizer().encode("h\u00e9")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([""], "PROMPT 1 is empty; it must hold at least one token"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens is 0; it must be a whole number of at least 1"),
        (["a", "--max-new-tokens", "-3"], "max_new_tokens is -3;"),
        (["a", "--max-new-tokens", "ten"], "argument --max-new-tokens: invalid int value: 'ten'"),
        (["a", "--temperature", "-0.5"], "temperature is -0.5; it must be a number of at least 0"),
        (["a", "--temperature", "nan"], "temperature is nan;"),
        (["a", "--top-p", "0"], "top_p is 0.0; it must be a number above 0 and at most 1"),
        (["a", "--top-p", "1.5"], "top_p is 1.5;"),
        (["a", "--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be a number of at least 0.001"),
        (["a", "--seed", "-1"], "seed is -1;"),
        (["a", "--stop", ""], "stop holds ''"),
        (["a", "--output", "yaml"], "argument --output: invalid choice: 'yaml'"),
        (["a", "--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["a", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["a", "--temp", "1"], "unrecognized arguments: --temp"),
        (["--prompt-ids", "1,x"], "argument --prompt-ids: '1,x' is no list of token ids such as 1,2,3"),
        (["--prompt-ids", "1,900"], "prompt 1 holds token id 900; the model's ids run from 0 to 258"),
        (["--prompt-ids", ",".join(["1"] * 1024)], "prompt 1 has 1024 tokens; the model takes at most 1024"),
        (["a", "--max-batch-size", "0"], "max_batch_size is 0; it must be at least 1"),
        (["a", "--stream", "--output", "json"], "--stream works with --output text"),
        (["a", "--system", "s", "--no-chat"], "--system needs the chat template"),
        (["--prompt-ids", "1", "--system", "s"], "--system has no place in a prompt of token ids"),
        (["a", "--drafter", "/no/such/dir"], "/no/such/dir: no such directory or file"),
        (["a", "--speculative-config", '{"metod": "dflash"}'], "unknown key metod; the nearest known one is method"),
        (["a", "--speculative-config", "no.json"], "'no.json' is neither a JSON object nor a readable file"),
        (["a", "--method", "medusa"], "argument --method: invalid choice: 'medusa'"),
        (["a", "--method", "dflash"], "speculation is asked for, but there is no drafter"),
        (
            ["a", "--num-speculative-tokens", "0"],
            "num_speculative_tokens is 0; it must be a whole number from 1 to 128",
        ),
        (["a", "--draft-sample-method", "both"], "argument --draft-sample-method: invalid choice: 'both'"),
        (["a", "--confidence-threshold", "1.5"], "confidence_threshold is 1.5; it must be a number from 0 to 1"),
        (["a", "--trace", "/no/such/dir/t.jsonl"], "--trace /no/such/dir/t.jsonl: cannot be written: No such file"),
        (["a", "--trace", "/"], "--trace /: cannot be written: Is a directory"),
        (["a", "--drafter", ""], "the path is empty; a directory, a hub id or a .gguf file is wanted"),
        (
            ["a", "--drafter", "/", "--speculative-config", '{"revision": "main"}'],
            "/: is local and has no revision 'main'; only a hub id has one",
        ),
        (["a", "--mesh", "tensor=2"], "mesh: tensor 2 are 2 devices; there are 1"),
        (
            ["a", "--kernels", "triton"],
            "--kernels triton needs an NVIDIA GPU, and the device here is a cpu; leave it out",
        ),
        (["a", "--kernels", "cuda"], "argument --kernels: invalid choice: 'cuda'"),
        (["a", "--model", "/no/such/dir"], "/no/such/dir"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, capsys, argv, message):
    chosen = [] if "--model" in argv else ["--model", model]
    assert generate(*argv, *chosen) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxspec.generate: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON: "),
        (b'\n{"prompt": "a"}\n["a"]', "line 3 is no JSON object"),
        (
            b'{"prompt": "a", "max_tokens": 3}',
            "line 1 has the unknown key 'max_tokens'; known keys: prompt, messages, prompt_ids",
        ),
        (b'{"prompt": "a", "prompt_ids": [1]}', "line 1 has 2 keys; it must have exactly one of"),
        (b"{}", "line 1 has 0 keys"),
        (b'{"prompt": 3}', "line 1: prompt is 3; it must be a string"),
        (b'{"prompt": ""}', "line 1 is empty"),
        (b'{"prompt_ids": []}', "line 1 is empty"),
        (b'{"prompt_ids": [1.5]}', "line 1: prompt_ids is [1.5]; it must be a list of whole numbers"),
        (b'{"messages": [{"role": "user"}]}', "line 1: message 1 has no text as its content"),
        (b"[" * 100000, "line 1 is"),
        (b"\x00\x9f\x92\x96 GGUF", "is not text: byte 2 is not UTF-8; it must be JSON lines"),
        (b"", "is empty; it must hold one JSON object a line"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path, capsys, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert generate("--model", "unused", "--prompt-file", str(file)) == BAD_INPUT
    err = capsys.readouterr().err
    assert f"--prompt-file {file}" in err and message in err and err.count("\n") == 1


def test_a_missing_prompt_file_and_no_prompt_are_named(tmp_path, capsys, monkeypatch):
    assert generate("--prompt-file", str(tmp_path / "none")) == BAD_INPUT
    assert "none: No such file or directory" in capsys.readouterr().err
    assert generate("--prompt-file", str(tmp_path)) == BAD_INPUT
    assert "Is a directory" in capsys.readouterr().err
    for content, message in ((b"", "stdin is empty"), (b"\xff\xfe", "stdin is not text: byte 1")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert generate("--model", "unused") == BAD_INPUT
        assert message in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert generate("--model", "unused") == BAD_INPUT
    assert "there is no prompt; give PROMPT" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert read_prompt_file(file) == [{"prompt": "a"}]


def test_the_system_message_opens_conversations_that_have_none():
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]}
    bare = {"messages": [{"role": "user", "content": "b"}]}
    given = {"role": "system", "content": "given"}
    prompts = apply_chat([own, bare, {"prompt": "c"}], True, "given")
    assert prompts == [
        own,
        {"messages": [given, {"role": "user", "content": "b"}]},
        {"messages": [given, {"role": "user", "content": "c"}]},
    ]
    assert apply_chat([{"prompt": "c"}], False, None) == [{"prompt": "c"}]


def test_chat_without_a_template_and_text_without_a_tokenizer_are_refused(tmp_path, capsys):
    plain = str(write_model(tmp_path / "plain", chat=False))
    assert generate("--model", plain, "a", "--chat") == BAD_INPUT
    assert "need a chat template" in capsys.readouterr().err
    bare = str(write_model(tmp_path / "bare", tokenizer=False))
    assert generate("--model", bare, "--prompt-ids", "1,2") == BAD_INPUT
    assert "the model has no tokenizer, so there is no text to print; use --output json" in capsys.readouterr().err
    assert generate("--model", bare, "a", "--output", "json") == BAD_INPUT
    assert "no tokenizer; give token ids" in capsys.readouterr().err
    broken = write_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    assert generate("--model", str(broken), "a") == BAD_INPUT
    err = capsys.readouterr().err
    assert f"{broken}: its tokenizer cannot be read" in err and err.count("\n") == 1


def test_ctrl_c_prints_what_there_is_and_ends_with_130(model, capsys, monkeypatch):
    decode, calls = Programs.decode, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(Programs, "decode", interrupted)
    argv = ["--model", model, "Hello", "--max-new-tokens", "100", "--ignore-eos"]
    assert generate(*argv, "--output", "json") == INTERRUPTED
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert len(answer["token_ids"]) == 32 and answer["finish_reason"] is None
    assert err == "jaxspec.generate: interrupted\n"
    calls.clear()
    assert generate(*argv, "--stream") == INTERRUPTED
    out, err = capsys.readouterr()
    assert out.endswith("\n") and err == "jaxspec.generate: interrupted\n"


def test_an_internal_failure_is_exit_code_1_with_a_traceback(capsys):
    def broken(argv: list[str]) -> None:
        raise RuntimeError("a bug")

    assert run("name", broken, []) == INTERNAL
    err = capsys.readouterr().err
    assert "Traceback" in err and "RuntimeError: a bug" in err


def test_a_message_of_several_lines_becomes_one():
    assert one_line("a\n  b  c\r\n") == "a b  c"


# The real thing, in processes of its own


def command(*argv: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), str(root / "kernels")])
    return [sys.executable, "-m", "jaxspec.generate", *argv], {**os.environ, "PYTHONPATH": path, **environment}


def test_help_is_quick_and_imports_no_jax():
    argv, environment = command("--help", PYTHONPROFILEIMPORTTIME="1")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--max-new-tokens" in done.stdout
    modules = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "jaxspec.prompts" in modules
    assert not modules & {"jax", "flax", "transformers", "numpy"}


def test_a_process_prints_only_its_answer_and_a_second_one_compiles_nothing(model, tmp_path):
    argv, environment = command(
        "--model", model, "Hello", *SHORT, "--output", "json", JAXSPEC_CACHE=str(tmp_path / "cache")
    )
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)

    def answer() -> list[int]:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)["token_ids"]

    def programs() -> set[str]:
        return {file.name for file in (tmp_path / "cache" / "xla").iterdir() if file.name.endswith("-cache")}

    first, kept = answer(), programs()
    assert kept
    assert answer() == first
    assert programs() == kept


def test_ctrl_c_in_a_real_process_keeps_the_text(model):
    argv, environment = command(
        "--model", model, "Hello", "--stream", "--ignore-eos", "--max-new-tokens", "1000", "--temperature", "1"
    )
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the process was done before the signal came")
    assert (process.returncode, err) == (INTERRUPTED, b"jaxspec.generate: interrupted\n")
    assert first + out


def test_drafter_none_decodes_plainly_whatever_the_config_says(model, capsys):
    config = '{"model": "/no/such/drafter", "num_speculative_tokens": 3}'
    arguments = ("--model", model, "--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--output", "json")
    assert generate(*arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert generate(*arguments, "--drafter", "none", "--speculative-config", config) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == plain["token_ids"] and answer["speculative"] is None
