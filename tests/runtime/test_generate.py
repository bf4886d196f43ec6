"""Generating: what ends it, what is shown of it, and that one generation never disturbs another."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import scripted_artifact
from diptych.runtime import Generation, LanguageModel, Result, load, session
from diptych.runtime.options import OptionNames, Options
from diptych.runtime.session import NonFiniteLogits

Files = dict[str, str]
Script = Callable[..., LanguageModel]

NOISE = np.random.default_rng(3).integers(3, 97, 60).tolist()


@pytest.fixture
def scripted(tmp_path: Path, smollm2_tokenizer: Files) -> Script:
    """``scripted("text", …)``: after a prompt of one token, the model says the text, token by token, then ends it."""

    def make(text: str | Sequence[int], *, end: int = 2, **options: Any) -> LanguageModel:
        folder = scripted_artifact.write(tmp_path, [end], vocabulary=49_152, files=smollm2_tokenizer)
        said = load(folder, threads=1).text.encode(text) if isinstance(text, str) else list(text)
        files = smollm2_tokenizer
        options = {"eos": [end], **options}
        return load(
            scripted_artifact.write(tmp_path, [*said, end], vocabulary=49_152, files=files, **options), threads=1
        )

    return make


def streamed(generation: Generation) -> tuple[list[str], Result]:
    return list(generation), generation.result


# ----------------------------------------------------------------------------------------------------- what it gives


def test_the_loop_is_prefill_then_decode(model: LanguageModel) -> None:
    rows = model.session()
    logits, expected = rows.prefill(0, NOISE[:7]), []
    for _ in range(20):
        expected.append(int(logits.argmax()))
        logits = rows.decode(expected[-1:])
    result = model.generate(NOISE[:7], max_tokens=20, eos_token_id=[])
    assert result.token_ids == expected
    assert result.text == model.text.decode(expected)
    assert (result.finish_reason, result.finish_detail) == ("length", None)
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (7, 0, 20)
    assert result.seed is None


def test_one_session_serves_both_phases(model: LanguageModel) -> None:
    double = load(model.manifest.folder, sessions="two", threads=1)
    results = [each.generate(NOISE[:9], max_tokens=20) for each in (model, double)]
    assert results[0].token_ids == results[1].token_ids
    assert [result.to_json()["runtime"]["sessions"] for result in results] == ["one", "two"]


def test_results_as_json(model: LanguageModel) -> None:
    result = model.generate(NOISE[:5], max_tokens=4, temperature=1.0, seed=11)
    data = json.loads(json.dumps(result.to_json()))
    assert set(data) == {field.name for field in fields(Result)}
    how = {"sessions": "one", "threads": 1, "spinning": True, "float32_prefill": False}
    assert data["runtime"] == {"model": "tiny", "target": "ort", "provider": "cpu", **how}
    assert data["seed"] == 11
    assert all(seconds > 0 for seconds in data["timing"].values())


def test_what_was_not_done_was_not_timed(model: LanguageModel) -> None:
    one = model.generate(NOISE[:5], max_tokens=1).timing
    assert one.ttft_s and one.prefill_tokens_per_s
    assert one.decode_tokens_per_s is None
    none = model.generate(NOISE[:5], max_tokens=0)
    assert (none.text, none.token_ids, none.finish_reason) == ("", [], "length")
    assert none.timing.ttft_s is none.timing.prefill_tokens_per_s is none.timing.decode_tokens_per_s is None


def test_the_caller_may_take_its_time(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds between two pieces are not the model's."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.perf_counter", tick)
    generation = model.stream(NOISE[:5], max_tokens=10, eos_token_id=[])
    for _ in generation:
        now[0] += 1000
    timing = generation.result.timing
    assert timing.ttft_s is not None and timing.ttft_s < 1
    assert timing.decode_tokens_per_s == pytest.approx(1000)


def test_a_seed_repeats_and_is_told(model: LanguageModel) -> None:
    def run(**options: Any) -> Result:
        return model.generate(NOISE[:5], max_tokens=12, temperature=1.5, eos_token_id=[], **options)

    assert run(seed=5).token_ids == run(seed=5).token_ids
    assert len({tuple(run(seed=seed).token_ids) for seed in range(5)}) == 5
    free = run()
    assert free.seed is not None
    assert run(seed=free.seed).token_ids == free.token_ids


def test_the_penalty_counts_prompt_and_answer(model: LanguageModel) -> None:
    result = model.generate(NOISE[:5], max_tokens=40, repetition_penalty=1e6, eos_token_id=[])
    assert len({*NOISE[:5], *result.token_ids}) == len({*NOISE[:5]}) + 40


# ------------------------------------------------------------------------------------------------------ what ends it


@pytest.mark.parametrize(
    ("eos", "reason", "detail", "count"),
    [
        (None, "eos", 2, 6),
        (7, "eos", 7, 3),
        ([9, 7], "eos", 7, 3),
        ([], "length", None, 8),
        ((), "length", None, 8),
        ([40_000], "length", None, 8),
    ],
)
def test_what_ends_a_text(scripted: Script, eos: Any, reason: str, detail: int | None, count: int) -> None:
    said = scripted([5, 6, 7, 8, 9])
    result = said.generate([1], max_tokens=8, eos_token_id=eos)
    assert (result.finish_reason, result.finish_detail, len(result.token_ids)) == (reason, detail, count)
    assert result.token_ids == [5, 6, 7, 8, 9, 2, 2, 2][:count]


def test_an_artifact_may_have_several_ends_or_none(scripted: Script) -> None:
    result = scripted([5, 6, 0, 8], eos=[2, 0]).generate([1])
    assert (result.finish_reason, result.finish_detail, result.token_ids) == ("eos", 0, [5, 6, 0])
    assert scripted([5, 6], eos=[]).generate([1], max_tokens=4).finish_reason == "length"


@pytest.mark.parametrize(("prompt", "count"), [(30, 3), (31, 2), (32, 1)])
def test_the_end_of_the_capacity(model: LanguageModel, prompt: int, count: int) -> None:
    """n tokens in a capacity of c leave room for c - n + 1 more: the last one need not be held."""
    rows = model.session(capacity=32)
    result = model.generate(NOISE[:prompt], max_tokens=100, eos_token_id=[], session=rows)
    assert (result.finish_reason, len(result.token_ids)) == ("capacity", count)
    assert rows.tokens(0) == [*NOISE[:prompt], *result.token_ids[:-1]]
    unlimited = model.generate(NOISE[:prompt], max_tokens=count, eos_token_id=[])
    assert result.token_ids == unlimited.token_ids


def test_the_capacity_of_the_artifact(model: LanguageModel) -> None:
    result = model.generate([5] * 250, max_tokens=None, eos_token_id=[])
    assert (result.finish_reason, len(result.token_ids)) == ("capacity", 7)
    with pytest.raises(ValueError, match="the prompt has 257 tokens, and the context holds 256"):
        model.stream([5] * 257)


STOPS: list[tuple[str | list[str], str, str]] = [
    ("\nUser:", "Hello, Users:\nUsers\nUser", "\nUser: me"),
    (["alpha beta"], "gamma alpha alph beta ", "alpha beta alpha"),
    (["bet", "beta"], "alpha ", "beta"),
    (["👩"], "family: 👨\u200d", "👩\u200d👧 and"),
    ([f"{i}." for i in range(200)], "point 2: one hundred and ", "17. five"),
]


@pytest.mark.parametrize(("stop", "before", "after"), STOPS)
def test_stop_strings_never_show(scripted: Script, stop: Any, before: str, after: str) -> None:
    said = scripted(before + after)
    pieces, result = streamed(said.stream([1], stop=stop))
    assert "".join(pieces) == result.text == before
    assert result.finish_reason == "stop"
    assert after.startswith(str(result.finish_detail))
    assert said.generate([1], stop=stop).text == before


def test_what_was_held_back_is_released_in_the_end(scripted: Script) -> None:
    said = scripted("one two thr")
    for limit in (None, len(said.text.encode("one two thr"))):
        pieces, result = streamed(said.stream([1], stop=["two three"], max_tokens=limit))
        assert "".join(pieces) == result.text == "one two thr"


def test_a_special_token_as_a_stop_string(scripted: Script) -> None:
    said = scripted("one<|im_start|>two")
    result = said.generate([1], stop=["<|im_start|>"])
    assert (result.text, result.finish_reason, result.finish_detail) == ("one", "stop", "<|im_start|>")
    assert said.generate([1]).text == "onetwo"
    assert said.generate([1], skip_special_tokens=False).text == "one<|im_start|>two<|im_end|>"[: -len("<|im_end|>")]


WORLD = "🇫🇷👨‍👩‍👧 삼겹살 ďábel नमस्ते"


def test_streaming_shows_whole_characters(scripted: Script) -> None:
    said = scripted(WORLD)
    pieces, result = streamed(said.stream([1], raw=True))
    assert "".join(pieces) == result.text == WORLD
    assert all(pieces)
    assert "\ufffd" not in result.text
    for limit in range(1, 12):
        assert WORLD.startswith(said.generate([1], max_tokens=limit).text)


# ------------------------------------------------------------------------------------------------- what it starts from


def test_prompts_of_every_kind(scripted: Script) -> None:
    said = scripted("x", max_context=200)
    messages = [{"role": "user", "content": "Hi"}]
    chat = said.text.encode_chat(messages)
    assert said.encode("Hi") == said.encode("Hi", raw=False) == said.encode(messages) == chat
    assert said.encode("Hi", raw=True) == said.text.encode("Hi")
    assert said.encode([5, 6]) == said.encode((5, 6)) == said.encode(np.array([5, 6])) == [5, 6]
    assert said.generate("Hi").usage.prompt_tokens == len(chat)


def test_templates_get_tools_and_more(tmp_path: Path, byte_level_tokenizer: Files) -> None:
    template = "{{ tools | length if tools else 'none' }}{{ mood }}{{ add_generation_prompt }}{{ messages[0].content }}"
    files = {**byte_level_tokenizer, "chat_template.jinja": template}
    said = load(scripted_artifact.write(tmp_path, [5], vocabulary=97, files=files), threads=1)
    plain = [{"role": "user", "content": "Hi"}]
    assert said.encode(plain) == said.text.encode("noneTrueHi")
    variables = {"mood": "good", "add_generation_prompt": False}
    assert said.encode(plain, tools=[{}], chat_template_kwargs=variables) == said.text.encode("1goodFalseHi")


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int64)], ids=repr)
def test_nothing_to_start_from(model: LanguageModel, prompt: Any) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(prompt, raw=True)
    assert model.generate([5], max_tokens=1).token_ids  # and the next one works


def test_an_empty_prompt_is_its_beginning_where_there_is_one(tmp_path: Path, sentencepiece_tokenizer: Files) -> None:
    said = load(scripted_artifact.write(tmp_path, [5], vocabulary=400, files=sentencepiece_tokenizer), threads=1)
    assert said.encode("") == [2]
    assert said.generate("", max_tokens=2).token_ids == [5, 5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "token ids"),
        ([[5]], "token ids"),
        ([5, "a"], "token ids"),
        (["a", "b"], "token ids"),
        (b"abc", "a prompt is a string"),
        (5, "a prompt is a string"),
        (None, "a prompt is a string"),
        ({"role": "user", "content": "Hi"}, "a prompt is a string"),
        ([5, 97], r"token id 97 \(at 1\) is not in the model"),
        ([{"role": "user", "content": "Hi"}, 5], "message 1 must be a mapping"),
        ([{}], "message 0 must be a mapping with a 'role'"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_runs(model: LanguageModel, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.stream(prompt)


def test_messages_are_never_raw(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="raw=True continues text as it is"):
        model.stream([{"role": "user", "content": "Hi"}], raw=True)


def test_text_without_a_template(tmp_path: Path, sentencepiece_tokenizer: Files) -> None:
    said = load(scripted_artifact.write(tmp_path, [5], vocabulary=400, files=sentencepiece_tokenizer), threads=1)
    assert said.encode("the") == said.encode("the", raw=True)
    with pytest.raises(ValueError, match="no chat template"):
        said.encode("the", raw=False)
    with pytest.raises(ValueError, match="no chat template"):
        said.encode([{"role": "user", "content": "the"}])


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    said = load(scripted_artifact.write(tmp_path, [5, 6], vocabulary=9, eos=[6]), threads=1)
    result = said.generate([1], stop=["x"])
    assert (result.text, result.token_ids, result.finish_reason) == ("", [5, 6], "eos")


# ------------------------------------------------------------------------------------------------- sessions used again


def test_a_session_is_continued(model: LanguageModel) -> None:
    rows = model.session()
    first = model.generate(NOISE[:20], max_tokens=5, eos_token_id=[], session=rows)
    assert first.usage.cached_tokens == 0
    longer = [*NOISE[:20], *first.token_ids, *NOISE[20:30]]
    warm = model.generate(longer, max_tokens=5, eos_token_id=[], session=rows)
    cold = model.generate(longer, max_tokens=5, eos_token_id=[])
    assert warm.token_ids == cold.token_ids
    assert (warm.usage.cached_tokens, warm.usage.prompt_tokens) == (24, 35)


@given(shared=st.integers(0, 40), own=st.integers(1, 15))
def test_any_shared_beginning_is_kept_and_nothing_else(
    load_variant: Callable[..., LanguageModel], shared: int, own: int
) -> None:
    windowed = load_variant("gemma3", "ort")  # windows of 16
    rows = windowed.session()
    windowed.generate([*NOISE[:shared], *[9] * own], max_tokens=3, session=rows)
    prompt = [*NOISE[:shared], *[10] * own]
    warm = windowed.generate(prompt, max_tokens=8, session=rows)
    assert warm.usage.cached_tokens == shared
    assert warm.token_ids == windowed.generate(prompt, max_tokens=8).token_ids


def test_the_same_prompt_again_computes_its_last_token(model: LanguageModel) -> None:
    rows = model.session()
    results = [model.generate(NOISE[:20], max_tokens=5, session=rows) for _ in range(3)]
    assert [result.usage.cached_tokens for result in results] == [0, 19, 19]
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids


def test_a_generation_needs_one_row(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="a session of one row, not 2"):
        model.stream([5], session=model.session(rows=2))


# --------------------------------------------------------------------------------------------------------- cancelling


def still_works(model: LanguageModel, rows: Any) -> None:
    warm = model.generate(NOISE, max_tokens=6, eos_token_id=[], session=rows)
    assert warm.token_ids == model.generate(NOISE, max_tokens=6, eos_token_id=[]).token_ids


def test_closing_stops_within_a_step(model: LanguageModel) -> None:
    rows = model.session()
    generation = model.stream(NOISE, max_tokens=None, eos_token_id=[], session=rows)
    shown = next(generation)
    generation.close()
    assert list(generation) == []
    held = rows.lengths[0]
    result = generation.result
    assert (result.finish_reason, result.text) == ("cancelled", shown)
    assert held - len(NOISE) <= len(result.token_ids)
    generation.close()  # again does nothing
    assert generation.result == result
    still_works(model, rows)


def test_leaving_a_block_closes(model: LanguageModel) -> None:
    with model.stream(NOISE, max_tokens=None) as generation:
        next(generation)
    assert generation.result.finish_reason == "cancelled"


def test_closing_before_it_starts(model: LanguageModel) -> None:
    generation = model.stream(NOISE)
    generation.close()
    assert list(generation) == []
    assert (generation.result.finish_reason, generation.result.token_ids) == ("cancelled", [])


def test_closing_after_it_ended_changes_nothing(model: LanguageModel) -> None:
    generation = model.stream(NOISE, max_tokens=3, eos_token_id=[])
    list(generation)
    generation.close()
    assert generation.result.finish_reason == "length"


def test_no_result_before_the_end(model: LanguageModel) -> None:
    generation = model.stream(NOISE)
    with pytest.raises(RuntimeError, match="the generation has not ended"):
        _ = generation.result


@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()], ids=repr)
def test_a_callback_that_raises(model: LanguageModel, error: BaseException) -> None:
    rows, seen = model.session(), []

    def stop(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 3:
            raise error

    with pytest.raises(type(error)):
        model.generate(NOISE, max_tokens=None, eos_token_id=[], on_piece=stop, session=rows)
    assert len(seen) == 3
    assert rows.lengths[0] < len(NOISE) + 20
    still_works(model, rows)


def test_ctrl_c_amid_a_step(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = model.session()
    generation = model.stream(NOISE, max_tokens=None, eos_token_id=[], session=rows)
    next(generation)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rows, "decode", interrupted)
        list(generation)
    assert generation.result.finish_reason == "cancelled"
    still_works(model, rows)


def test_closing_from_another_thread(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it computes, and also amid a long prompt."""
    monkeypatch.setattr(session, "CHUNK", 8)
    rows = model.session()
    generation = model.stream(NOISE, max_tokens=None, session=rows)
    prefill = rows._prefill_chunk

    def close_then(*arguments: Any) -> Any:
        closer = threading.Thread(target=generation.close)
        closer.start()
        closer.join()
        return prefill(*arguments)

    monkeypatch.setattr(rows, "_prefill_chunk", close_then)
    assert list(generation) == []
    assert generation.result.finish_reason == "cancelled"
    assert rows.lengths.tolist() == [8]
    monkeypatch.undo()
    still_works(model, rows)


def test_threads_do_not_disturb_each_other(model: LanguageModel) -> None:
    prompts = [NOISE[i : i + 10] for i in range(8)]
    alone = [model.generate(prompt, max_tokens=30, eos_token_id=[]).token_ids for prompt in prompts]

    def run(i: int) -> list[int]:
        generation = model.stream(prompts[i], max_tokens=30, eos_token_id=[])
        for count, _ in enumerate(generation):
            if i % 2 and count == 3:
                generation.close()
        return generation.result.token_ids

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    assert [ids for i, ids in enumerate(together) if i % 2 == 0] == alone[::2]
    for ids, expected in zip(together[1::2], alone[1::2], strict=True):
        assert len(ids) < 30
        assert ids == expected[: len(ids)]


def test_logits_that_are_not_finite_raise_and_name_the_step(scripted: Script) -> None:
    said = scripted([5, 6, 7, 8], broken={3: float("nan")}, max_context=30)
    rows = said.session()
    with pytest.raises(NonFiniteLogits, match=r"a decode step gave logits that are not finite.*after 3 tokens"):
        said.generate([1], session=rows)
    assert rows.lengths.tolist() == [0]
    assert said.generate([1], max_tokens=3, session=rows).token_ids == [5, 6, 7]
    generation = said.stream([1])
    with pytest.raises(NonFiniteLogits):
        list(generation)
    assert (generation.result.finish_reason, generation.result.token_ids) == ("error", [5, 6, 7])


# ------------------------------------------------------------------------------------------------------------- batches


def test_one_string_is_no_batch(load_variant: Callable[..., LanguageModel]) -> None:
    with pytest.raises(ValueError, match="not one string"):
        load_variant("llama", "ort").generate_batch("abc")


def test_a_batch_gives_what_each_prompt_gives_alone(load_variant: Callable[..., LanguageModel]) -> None:
    for family in ("llama", "gemma3"):
        each = load_variant(family, "ort")
        prompts = [NOISE[:3], NOISE[:17], NOISE[:40], NOISE[5:6]]
        alone = [each.generate(prompt, max_tokens=20, eos_token_id=[]) for prompt in prompts]
        together = each.generate_batch(prompts, max_tokens=20, eos_token_id=[])
        for one, other in zip(alone, together, strict=True):
            assert (one.token_ids, one.text, one.usage) == (other.token_ids, other.text, other.usage)


def test_rows_of_a_batch_end_one_by_one(model: LanguageModel) -> None:
    prompts = [NOISE[i : i + 5 + i] for i in range(4)]
    alone = [model.generate(prompt, max_tokens=12, eos_token_id=[]).token_ids for prompt in prompts]
    overrides: list[OptionNames] = [
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 5},
        {"eos_token_id": alone[3][7]},
    ]
    results = model.generate_batch(prompts, overrides=overrides, max_tokens=12, eos_token_id=[])
    assert [result.token_ids for result in results[:3]] == [[], alone[1][:1], alone[2][:5]]
    end = alone[3].index(alone[3][7]) + 1
    assert results[3].token_ids == alone[3][:end]
    assert [(result.finish_reason, result.finish_detail) for result in results] == [
        ("length", None), ("length", None), ("length", None), ("eos", alone[3][7]),
    ]  # fmt: skip


def test_a_row_of_a_batch_may_run_full(model: LanguageModel) -> None:
    results = model.generate_batch([[5] * 254, NOISE[:4]], max_tokens=20, eos_token_id=[])
    assert [(result.finish_reason, len(result.token_ids)) for result in results] == [("capacity", 3), ("length", 20)]
    assert results[1].token_ids == model.generate(NOISE[:4], max_tokens=20, eos_token_id=[]).token_ids


def test_a_broken_row_does_not_stop_the_others(scripted: Script) -> None:
    said = scripted([5] * 30, broken={6: float("inf")}, max_context=30)
    results = said.generate_batch([[1] * 4, [1] * 2, [1] * 7, [1] * 9], max_tokens=4)
    assert [(result.finish_reason, len(result.token_ids)) for result in results] == [
        ("error", 3), ("length", 4), ("error", 0), ("length", 4),
    ]  # fmt: skip
    assert "row 0 after 6 tokens" in str(results[0].finish_detail)
    assert "prefill of 7 tokens" in str(results[2].finish_detail)


def test_seeds_of_a_batch(model: LanguageModel) -> None:
    options: Any = {"temperature": 1.5, "max_tokens": 8, "eos_token_id": []}
    results = model.generate_batch([NOISE[:5]] * 3, overrides=[{"seed": seed} for seed in range(3)], **options)
    for seed, result in enumerate(results):
        assert result.token_ids == model.generate(NOISE[:5], seed=seed, **options).token_ids


@pytest.mark.parametrize(("prompts", "overrides"), [([], None), ([[5]], [{}, {}]), ([[5], [6]], [{}])])
def test_batches_that_do_not_fit(model: LanguageModel, prompts: Any, overrides: Any) -> None:
    with pytest.raises(ValueError, match="a batch needs prompts, and overrides for each"):
        model.generate_batch(prompts, overrides=overrides)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate_batch([[5], []])


# ------------------------------------------------------------------------------------------------------------- options


def test_the_names_agree() -> None:
    assert list(OptionNames.__annotations__) == [field.name for field in fields(Options)]
    for method in (LanguageModel.generate, LanguageModel.stream, LanguageModel.generate_batch, LanguageModel.encode):
        assert "options" in inspect.signature(method).parameters


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("top-p", "did you mean 'top_p'?"),
        ("max_new_tokens", "use max_tokens"),
        ("max_completion_tokens", "use max_tokens"),
        ("do_sample", "use temperature, where 0 is greedy"),
        ("stop_strings", "use stop"),
        ("enable_thinking", "use chat_template_kwargs"),
        ("streamer", "use on_piece"),
        ("logit_bias", "the options are: max_tokens, temperature, "),
    ],
)
def test_unknown_names_are_refused_with_a_hint(model: LanguageModel, name: str, hint: str) -> None:
    calls: list[Any] = [model.generate, model.stream, model.encode]
    for call in calls:
        with pytest.raises(TypeError) as error:
            call([5], **{name: 1})
        assert f"no option {name!r}; {hint}" in str(error.value)


HUGGING_FACE: Any = GenerationConfig
OPENAI = (
    "model messages audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens "
    "max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty reasoning_effort response_format "
    "seed service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user best_of "
    "echo suffix"
)


@pytest.mark.parametrize("name", sorted({*OPENAI.split(" "), *HUGGING_FACE().to_dict()}))
def test_every_name_of_other_libraries_is_honoured_or_refused(model: LanguageModel, name: str) -> None:
    """None of them is taken and ignored: what is honoured changes the options, all else is refused by name."""
    honoured = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0,
        "seed": 1, "stop": "x", "eos_token_id": 5, "tools": [{}],
    }  # fmt: skip
    if name in honoured:
        assert Options.named({name: honoured[name]}) != Options()
    else:
        generate: Any = model.generate
        with pytest.raises(TypeError, match=f"there is no option '{name}'"):
            generate([5], **{name: 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": True}, {"seed": -1}, {"seed": "x"},
        {"eos_token_id": -1}, {"eos_token_id": ["a"]}, {"eos_token_id": True}, {"temperature": -1}, {"top_k": -5},
        {"top_p": 2}, {"min_p": 2}, {"repetition_penalty": 0}, {"stop": ""}, {"stop": ["a", ""]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_refused(model: LanguageModel, wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match="a stop string" if name == "stop" else f"{name} must be"):
        model.stream([5], **wrong)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),  # without do_sample they are not in force
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 64, "top_p": 0.95, "eos_token_id": [1]},
         {"temperature": 0.6, "top_k": 64, "top_p": 0.95}),
        ({"repetition_penalty": 1.1, "max_length": 20}, {"repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_a_models_own_settings_are_for_who_asks(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    files = {"generation_config.json": json.dumps(config)}
    said = load(scripted_artifact.write(tmp_path, [5], vocabulary=9, files=files), threads=1)
    assert said.recommended == expected
    assert said.generate([1], max_tokens=2).seed is None  # greedy unless asked
    asked: Any = {**said.recommended, "max_tokens": 2}
    assert (said.generate([1], **asked).seed is not None) == ("temperature" in expected)
