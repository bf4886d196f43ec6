"""Tokenizers: ids and text as the originals give them, from a GGUF's metadata and from Hugging Face folders."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

import tiny
import tiny_tokenizers
from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import open_checkpoint
from diptych.jax_model.readers.gguf_header import read_header
from diptych.jax_model.readers.gguf_tokenizer import read_tokenizer
from diptych.jax_model.tokenizers import TokenizerFiles, from_folder
from naive_bpe import NaiveBpe

STORED = json.loads(Path(__file__).with_name("token_ids.json").read_text(encoding="utf-8"))["rows"]

# Published by other projects as what transformers or llama.cpp gives for SmolLM2.
PUBLISHED = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "In 2026, the weather": [788, 216, 34, 32, 34, 38, 28, 260, 3947],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "def add(a, b): return": [1604, 803, 24, 81, 28, 278, 727, 1003],
}


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> TokenizerFiles:
    return open_checkpoint(smollm2_gguf).tokenizer


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: Path) -> TokenizerFiles:
    return open_checkpoint(gemma3_gguf).tokenizer


@functools.lru_cache(maxsize=4)
def parsed(text: str) -> Tokenizer:
    return Tokenizer.from_str(text)


def tokenizer(files: TokenizerFiles) -> Tokenizer:
    return parsed(files.files["tokenizer.json"])


def config(files: TokenizerFiles) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(files.files["tokenizer_config.json"])
    return values


def generation(files: TokenizerFiles) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(files.files["generation_config.json"])
    return values


# -------------------------------------------------------------------------------------------------------- real models


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ids_are_those_of_the_original_tokenizer(model: str, request: pytest.FixtureRequest) -> None:
    """Against ``token_ids.json``, which says what its ids were made with."""
    ours = tokenizer(request.getfixturevalue(model))
    assert len(STORED) >= 500
    wrong = {row["text"]: ours.encode(row["text"]).ids for row in STORED if ours.encode(row["text"]).ids != row[model]}
    assert not wrong


def test_smollm2_gives_the_ids_that_others_publish(smollm2: TokenizerFiles) -> None:
    ours = tokenizer(smollm2)
    assert {text: ours.encode(text).ids for text in PUBLISHED} == PUBLISHED


@pytest.fixture(scope="module")
def both(smollm2_gguf: Path, smollm2: TokenizerFiles) -> tuple[Tokenizer, NaiveBpe]:
    return tokenizer(smollm2), NaiveBpe(read_header(smollm2_gguf).metadata)


# Characters that the oldest Python's tables know: newer ones may be letters to one library and nothing to another.
KNOWN = st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn", "Co"))


@given(text=st.text(KNOWN, max_size=20) | st.text(" \n\t'1aAé🙂½", max_size=20) | st.text("'stredlvm \n", max_size=20))
@settings(deadline=None)
def test_smollm2_agrees_with_plain_bpe_on_any_text(text: str, both: tuple[Tokenizer, NaiveBpe]) -> None:
    ours, naive = both
    assert ours.encode(text).ids == naive.encode(text)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_text_comes_back(model: str, request: pytest.FixtureRequest) -> None:
    ours = tokenizer(request.getfixturevalue(model))
    # Bytes without a token; spaces to be.
    lost = {"\0", "\x06", "\x1b[0m", "\U000e0001"} if model == "smollm2" else {"▁", "a▁b", "▁▁a ▁b c▁ ▁▁▁"}
    for text in (row["text"] for row in STORED):
        if text in lost:
            continue
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_what_surrounds_smollm2(smollm2: TokenizerFiles) -> None:
    ours = tokenizer(smollm2)
    assert ours.encode("").ids == []
    assert smollm2.bos_token_id is None
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.pad_token_id == 2
    assert smollm2.vocabulary_size == 49152
    assert generation(smollm2)["bos_token_id"] == 1
    assert {name: config(smollm2)[name] for name in ("bos_token", "eos_token", "pad_token")} == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    assert "<|im_start|>assistant" in smollm2.files["chat_template.jinja"]
    special = {id for id, token in ours.get_added_tokens_decoder().items() if token.special}
    assert special == set(range(17))
    assert ours.decode([2, 28, 0], skip_special_tokens=True) == ","


def test_what_surrounds_gemma(gemma3: TokenizerFiles) -> None:
    ours = tokenizer(gemma3)
    assert ours.encode("").ids == [2]
    assert ours.encode("a", "b").ids.count(2) == 2
    assert gemma3.bos_token_id == 2
    assert gemma3.eos_token_ids == (1, 106)
    assert gemma3.pad_token_id == 0
    assert gemma3.vocabulary_size == 262144
    assert config(gemma3)["bos_token"] == "<bos>"
    assert "chat_template.jinja" not in gemma3.files
    special = {token.content for token in ours.get_added_tokens_decoder().values() if token.special}
    assert {"<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"} < special
    assert "\n\n" not in special
    assert ours.decode([2, 106, 107], skip_special_tokens=True) == "\n"


def test_bytes_without_a_token_of_their_own_fall_back(gemma3: TokenizerFiles) -> None:
    ours = tokenizer(gemma3)
    encoding = ours.encode("\U000e0001", add_special_tokens=False)
    assert encoding.tokens == ["<0xF3>", "<0xA0>", "<0x80>", "<0x81>"]
    assert ours.decode(encoding.ids) == "\U000e0001"


# ------------------------------------------------------------------------------------------------- metadata of a GGUF


def tiny_metadata(kind: tiny_tokenizers.Kind, tmp_path: Path) -> dict[str, Any]:
    model = tiny.llama() if kind == "byte_level" else tiny.gemma3()
    return dict(read_header(tiny.write_gguf(model, tmp_path / "a.gguf")).metadata)


def convert(metadata: dict[str, Any]) -> TokenizerFiles:
    return read_tokenizer(Foreign(metadata, "a.gguf"))


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_a_gguf_twin_has_the_tokenizer_of_its_folder(variant: str, tmp_path: Path) -> None:
    model = tiny.VARIANTS[variant]
    from_gguf = open_checkpoint(tiny.write_gguf(model, tmp_path / "a.gguf")).tokenizer
    from_huggingface = open_checkpoint(tiny.write_huggingface(model, tmp_path / "a")).tokenizer
    ours, theirs = tokenizer(from_gguf), tokenizer(from_huggingface)
    for text in ("the tin", "  The\n 42!", "héé 🙂", "", "<|im_end|>a", "<eos> in"):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        ids = theirs.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids)
    for name in ("eos_token_ids", "bos_token_id", "pad_token_id", "vocabulary_size"):
        assert getattr(from_gguf, name) == getattr(from_huggingface, name)
    assert from_gguf.files.get("chat_template.jinja") == from_huggingface.files.get("chat_template.jinja")


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{key}")


def put(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value for key, value in values.items()})


Kind = tiny_tokenizers.Kind
REFUSED: dict[str, tuple[Kind, Callable[[dict[str, Any]], Any], str]] = {
    "no kind": ("byte_level", without("model"), "no 'tokenizer.ggml.model'"),
    "another kind": ("byte_level", put(model="bert"), "tokenizer 'bert' is not supported; supported: gpt2, llama"),
    "unknown splitting": (
        "byte_level",
        put(pre="viking"),
        "'viking', an unknown way .* known: .*gpt-2, llama-bpe.*smollm",
    ),
    "no splitting": ("byte_level", without("pre"), "is '', an unknown way"),
    "the deprecated splitting": ("byte_level", put(pre="default"), "is 'default', an unknown way"),
    "no tokens": ("byte_level", without("tokens"), "no 'tokenizer.ggml.tokens'"),
    "tokens that are numbers": ("byte_level", put(tokens=[1, 2]), "should hold str, found 1"),
    "no types": ("byte_level", without("token_type"), "no 'tokenizer.ggml.token_type'"),
    "too few types": ("byte_level", put(token_type=[1]), "97 tokens, but 1 token types"),
    "no merges": ("byte_level", without("merges"), "no 'tokenizer.ggml.merges'"),
    "a merge of unknown tokens": ("byte_level", put(merges=["Q Q"]), "cannot read this tokenizer"),
    "a merge of three": ("byte_level", put(merges=["a b c"]), "cannot read this tokenizer"),
    "no scores": ("sentencepiece", without("scores"), "no 'tokenizer.ggml.scores'"),
    "too few scores": ("sentencepiece", put(scores=[0.0]), "tokens, but 1 scores"),
    "an end behind the end": (
        "byte_level",
        put(eos_token_id=97),
        "'tokenizer.ggml.eos_token_id' is 97, but .* 97 tokens",
    ),
    "an end in words": ("byte_level", put(eos_token_id="</s>"), "'tokenizer.ggml.eos_token_id' should be of type int"),
    "a BOS without a name": (
        "byte_level",
        lambda metadata: (metadata.pop("tokenizer.ggml.bos_token_id"), put(add_bos_token=True)(metadata)),
        "'tokenizer.ggml.bos_token_id' is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_make_no_tokenizer_are_refused(name: str, tmp_path: Path) -> None:
    kind, change, problem = REFUSED[name]
    metadata = tiny_metadata(kind, tmp_path)
    convert(metadata)
    change(metadata)
    with pytest.raises(ValueError, match=problem) as raised:
        convert(metadata)
    assert "a.gguf" in str(raised.value)


def test_a_token_twice_is_refused(tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path)
    metadata["tokenizer.ggml.tokens"][-1] = "a"
    with pytest.raises(ValueError, match="'a' occurs twice"):
        convert(metadata)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "dbrx", "starcoder"])
def test_the_name_of_the_splitting_decides_about_digits_and_bos(pre: str, tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path)
    for key in ("add_bos_token", "add_eos_token"):
        metadata.pop(f"tokenizer.ggml.{key}", None)
    digits = "0123456789"
    metadata["tokenizer.ggml.pre"] = pre
    longer = [digits[:n] for n in range(2, 11)]
    metadata["tokenizer.ggml.tokens"] += longer
    metadata["tokenizer.ggml.token_type"] += [1] * len(longer)
    metadata["tokenizer.ggml.merges"] += [f"{digits[: n - 1]} {digits[n - 1]}" for n in range(2, 11)]
    files = convert(metadata)
    tokens = tokenizer(files).encode(digits).tokens
    together = {
        "gpt-2": [digits],
        "smollm": list(digits),
        "starcoder": list(digits),
        "qwen2": list(digits),
        "llama-bpe": ["<|im_start|>", "012", *"3456789"],
        "dbrx": ["012", *"3456789"],
    }
    assert tokens == together[pre]
    assert files.bos_token_id == (1 if pre == "llama-bpe" else None)


def test_qwen2_is_split_and_normalised_as_transformers_does(tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path) | {"tokenizer.ggml.pre": "qwen2"}
    ours = json.loads(convert(metadata).files["tokenizer.json"])
    theirs = json.loads(Qwen2Tokenizer().backend_tokenizer.to_str())
    assert ours["pre_tokenizer"]["pretokenizers"][0] == theirs["pre_tokenizer"]["pretokenizers"][0]
    assert ours["normalizer"] == theirs["normalizer"]


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_bos_and_eos_are_added_as_the_file_says(kind: Kind, bos: bool, eos: bool, tmp_path: Path) -> None:
    metadata = tiny_metadata(kind, tmp_path)
    put(add_bos_token=bos, add_eos_token=eos)(metadata)
    files = convert(metadata)
    first, last = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    text = tokenizer(files).encode("in", add_special_tokens=False).ids
    assert tokenizer(files).encode("in").ids == [first] * bos + text + [last] * eos
    assert (files.bos_token_id is not None) == bos


def test_sentencepiece_without_flags_adds_bos_and_a_space(tmp_path: Path) -> None:
    metadata = tiny_metadata("sentencepiece", tmp_path)
    for key in ("add_bos_token", "add_space_prefix"):
        metadata.pop(f"tokenizer.ggml.{key}", None)
    ours = tokenizer(convert(metadata))
    encoding = ours.encode("the")
    assert encoding.tokens == ["<bos>", "▁the"]
    assert ours.decode(encoding.ids) == "the"


def test_every_declared_or_well_known_end_is_an_end(tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path)
    put(eos_token_id=2, eot_token_id=5, eom_token_id=6)(metadata)
    assert convert(metadata).eos_token_ids == (2, 5, 6, 0)
    types = metadata["tokenizer.ggml.token_type"]
    types[0] = 1  # <|endoftext|> as ordinary text is no end
    put(eos_token_id=7)(metadata)
    assert convert(metadata).eos_token_ids == (7, 5, 6, 2)


def test_suggestions_for_sampling_are_kept(tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path) | {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    assert generation(convert(metadata)).items() >= {"temperature": 0.25, "top_k": 7}.items()


def vocabulary_metadata(architecture: str, pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    base = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    tokens, scores, types = zip(*base, *pieces, strict=True)
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.add_space_prefix": False,
    }


def merges(files: TokenizerFiles) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(files.files["tokenizer.json"])["model"]["merges"]]


def test_merges_come_in_the_order_of_scores_and_ties_as_the_originals_break_them() -> None:
    """Gemma 3's own file puts the longest left part first, Llama 2's the parts with the smallest ids."""
    pieces = [("a", -1.0, 1), ("b", -2.0, 1), ("ab", -3.0, 1), ("ba", -4.0, 1), ("aba", -5.0, 1), ("bb", -0.5, 1)]
    expected = [("b", "b"), ("a", "b"), ("b", "a")]
    assert merges(convert(vocabulary_metadata("llama", pieces))) == [*expected, ("a", "ba"), ("ab", "a")]
    assert merges(convert(vocabulary_metadata("gemma3", pieces))) == [*expected, ("ab", "a"), ("a", "ba")]


def test_runs_of_spaces_are_spelled_as_they_are_looked_up() -> None:
    """llama.cpp stores them as spaces, typed user-defined, with -1000 over their score of zero."""
    pieces = [("▁", -1.0, 1), ("  ", -1000.0, 4), ("   ", -1000.0, 4), ("x", -2.0, 1), ("▁x", -3.0, 1)]
    ours = tokenizer(convert(vocabulary_metadata("gemma3", pieces)))
    assert ours.encode("   x", add_special_tokens=False).tokens == ["▁▁▁", "x"]
    assert ours.decode(ours.encode("   x").ids) == "   x"


def test_no_text_adds_up_to_a_control_token() -> None:
    pieces = [("<", -1.0, 1), ("end>", -2.0, 1), ("e", -3.0, 1), ("nd>", -4.0, 1), ("<end>", -5.0, 3)]
    files = convert(vocabulary_metadata("gemma3", pieces))
    assert ("<", "end>") not in merges(files)


# --------------------------------------------------------------------------------------------- Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_huggingface(tiny.llama(heads=(2, 1), head_size=4, width=8, layers=1, ffn=8), tmp_path / "model")


def edit(file: Path, **values: Any) -> None:
    """Change a JSON object; None takes a key out."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: value for key, value in {**known, **values}.items() if value is not None}))


def test_a_folders_own_tokenizer_is_taken_as_it_is(folder: Path) -> None:
    assert from_folder(folder).files["tokenizer.json"] == (folder / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "generated", "expected"),
    [
        (2, 2, (2, 0)),
        (None, None, (2, 0)),  # the token that is called EOS, and the well-known one
        ([7, 8], None, (7, 8, 2, 0)),
        (9, [7, 8], (7, 8, 9, 2, 0)),
        (None, [0, 2], (0, 2)),
    ],
)
def test_ends_are_the_union_of_all_that_is_declared(
    model: Any, generated: Any, expected: tuple[int, ...], folder: Path
) -> None:
    edit(folder / "config.json", eos_token_id=model)
    edit(folder / "generation_config.json", eos_token_id=generated, temperature=0.5)
    files = from_folder(folder)
    assert files.eos_token_ids == expected
    assert generation(files)["temperature"] == 0.5


def test_a_family_s_default_end_is_not_a_declared_one(folder: Path) -> None:
    """transformers gives every llama eos_token_id 2, and bos_token_id 1, unless the file says otherwise."""
    for file in ("config.json", "generation_config.json"):
        edit(folder / file, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None, bos_token=None, pad_token="<|endoftext|>")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("<|im_end|>", "<|other|>"))
    files = from_folder(folder)
    assert files.eos_token_ids == (0,)
    assert files.pad_token_id == 0
    assert generation(files)["bos_token_id"] is None


@pytest.mark.parametrize("value", ["2", 2.5, True, [None], {"a": 1}])
def test_an_end_that_is_no_number_is_refused(value: Any, folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match="'eos_token_id' should be a token's number"):
        from_folder(folder)


def test_tokens_with_flags_become_strings(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False}, added_tokens_decoder={}
    )
    files = from_folder(folder)
    assert config(files)["eos_token"] == "<|im_end|>"
    assert config(files)["tokenizer_class"] == "GPT2Tokenizer"
    assert not {"chat_template", "added_tokens_decoder"} & config(files).keys()


def test_names_may_be_in_the_old_map(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "special_tokens_map.json", eos_token="<|endoftext|>")
    assert config(from_folder(folder))["eos_token"] == "<|endoftext|>"


def test_the_chat_template_is_found_wherever_it_is(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert "chat_template.jinja" not in from_folder(folder).files
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert from_folder(folder).files["chat_template.jinja"] == "D"
    edit(folder / "tokenizer_config.json", chat_template="C")
    assert from_folder(folder).files["chat_template.jinja"] == "C"
    edit(folder / "chat_template.json", chat_template="O")
    assert from_folder(folder).files["chat_template.jinja"] == "O"
    (folder / "chat_template.jinja").write_text("J")
    assert from_folder(folder).files["chat_template.jinja"] == "J"


@pytest.mark.parametrize("add", [True, False])
def test_a_flag_about_bos_holds_where_the_file_does_otherwise(add: bool, tmp_path: Path) -> None:
    for kind in (tiny.llama(), tiny.gemma3()):
        folder = tiny.write_huggingface(kind, tmp_path / kind.tokenizer)
        edit(folder / "tokenizer_config.json", add_bos_token=add)
        files = from_folder(folder)
        ours = tokenizer(files)
        assert ours.encode("in").ids[: int(add)] == ([kind.config["bos_token_id"]] if add else [])
        assert (files.bos_token_id is not None) == add
        before = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert (
            ours.encode("the in", add_special_tokens=False).ids == before.encode("the in", add_special_tokens=False).ids
        )


def test_a_token_with_a_role_is_special(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"] = [{**token, "special": False} for token in spec["added_tokens"][:2]]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    ours = tokenizer(from_folder(folder))
    special = {token.content: id for id, token in ours.get_added_tokens_decoder().items() if token.special}
    assert special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_a_vocabulary_larger_than_the_embedding_is_counted_whole(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 97, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert from_folder(folder).vocabulary_size == 98


def test_without_a_tokenizer_json_transformers_converts_what_there_is(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    expected = tokenizer(from_folder(folder)).encode("the tin").ids
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        from_folder(folder)
    (folder / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    pairs = [" ".join(pair) for pair in spec["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    assert tokenizer(from_folder(folder)).encode("the tin").ids == expected


def test_a_sentencepiece_model_alone_is_converted(folder: Path) -> None:
    """Against sentencepiece itself, on a model made as Llama's was, from this file.

    At leading spaces the two part on purpose: transformers puts no further one before them.
    """
    (folder / "tokenizer.json").unlink()
    options: dict[str, Any] = {
        "byte_fallback": True,
        "split_digits": True,
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=__file__,
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=600,
        normalization_rule_name="identity",
        **options,
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **named}))
    converted = tokenizer(from_folder(folder))
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("def test(folder: Path)", "two  spaces and 12345", "é模 🇫🇷", "a\n\tb"):
        assert converted.encode(text).ids == [original.bos_id(), *original.encode(text)], text


@pytest.mark.parametrize("text", ["{}", "[]", '{"model": {"type": "New"}}', "x"])
def test_a_tokenizer_that_cannot_be_read_is_refused(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json: tokenizers .* cannot read this tokenizer"):
        from_folder(folder)
