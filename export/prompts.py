"""The texts that parity and quality are checked on: prose, languages, scripts, numbers, code; enough to cross a window
of 512 tokens.

What matters is that they are text: arbitrary tokens, which stand in where there is no tokenizer, leave a model in
states that it never has in use.
"""

from __future__ import annotations

from tokenizers import Tokenizer

__all__ = ["CALIBRATION", "CODE", "LONG", "QUESTION", "SHORT", "arbitrary", "encode"]

SHORT = """A diptych is two panels joined by a hinge. Name one that you know, say who painted it and when, and describe
in two sentences what the left panel shows and what the right one shows."""

LONG = """The lighthouse keeper wrote two books. The first he wrote in a single night, when the storm had taken the
boats and there was nothing to do but to read everything that the sailors had left behind: charts, letters, a
manual for an engine nobody owned any more, and eleven volumes of a novel whose twelfth was missing. He read
them all at once, as it seemed to him afterwards, the pages lying open across the floor so that each could be
compared with every other, and by morning he knew how the story had to end. That was hard work, but it was
over quickly.

The second book took years. Every evening he lit the lamp, looked at what he had written so far, and added one
word. Only one; but to choose it he carried the whole book up the stairs each time, for he had no memory of
his own and trusted none but the paper. As the book grew heavier the climb grew slower. "It is not the
thinking that tires me," he told the postmistress, "it is the carrying." She suggested that he leave the
finished chapters upstairs. He had not thought of that, and from then on he carried only the last word up and
the next one down.

Der Leuchtturmwärter verstand nicht viel von Büchern, aber er wusste, dass man ein Wort nicht zurücknehmen
kann, wenn das Schiff schon gewendet hat. Deshalb schrieb er langsam und strich nie etwas durch. Le facteur,
qui passait le mardi, prétendait qu'on pouvait lire dans les marges l'heure exacte de chaque marée : 4 h 12,
10 h 37, 16 h 58, 23 h 20. 灯台の光は 十二秒ごとに海を照らし、そのたびに一つの言葉が選ばれた。Маяк светил
ровно, а море отвечало как хотело. 등대지기는 대답을 기다리지 않았다.

In the thirty-first year an engineer came to automate the lamp. She found the notebooks, measured them, and
left this under a stone on the gallery:

def keep(light, words, limit=8192):
    state = {"read": 0, "said": []}
    for word in words:              # all of them together: the long night
        state["read"] += len(word)
    while state["read"] < limit and light.is_on():
        word = choose(state)        # one at a time: the long years
        if word is None or word == "\\n\\n":
            break
        state["said"].append(word)
        state["read"] += len(word)
    return " ".join(state["said"])

1. Check the oil: 3.75 litres a night, 27.4 kg a week, 1 425 kg a year (±2 %).
2. Wind the clockwork every 4 hours; it turns 0.0833 times a second, 5 times a minute, 7 200 times a day.
3. If the glass falls below 980 hPa, write it down: date | pressure | wind | remark.

| date  | pressure | wind  | remark                          |
| 03-11 | 979.2    | NW 9  | two boats in, one still out     |
| 03-12 | 983.8    | NW 7  | the third boat came in at noon  |

He kept the note, though he could not have said why, and he is said to have copied its last line into the book
as the four hundredth thousandth word or thereabouts. What became of the book is another matter. Some say that
the sea has it; others, that it was printed in a small edition and that whoever opens it in the middle hears
the lamp turning 🌊🔦. The postmistress, who ought to know, says only that it ends well, and that the twelfth
volume was never missing at all:"""

CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Two sorted lists as one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
'''

QUESTION = "The capital of France is"

# Read before quantising, so none of the texts that quality is told of.
CALIBRATION = """A good letter begins with the weather and ends with a request. My grandmother wrote two a week, one to
her sister in Lisbon and one to the tax office, and kept carbon copies of both. "Dear Sirs," she would write, "it has
rained since Tuesday, and I cannot find the form that you say you sent." In the summer of 1974 she bought a typewriter
with a German keyboard, so that every z became a y; the tax office never complained. The total came to $1,284.50, due
on 15 March.

import numpy as np

def softmax(x, axis=-1):
    shifted = np.exp(x - x.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)

Wasser kocht bei 100 Grad. L'eau bout à cent degrés. Вода кипит при ста градусах. 水は百度で沸騰する。
Question: What is the boiling point of water? Answer: It depends on the pressure; at sea level it is 100 °C.
1. Fill the kettle. 2. Switch it on. 3. Wait.
"""


def encode(tokenizer: str, text: str, V: int, *, begins: bool = True) -> list[int]:
    """The tokens of ``text`` by a ``tokenizer.json``, without those that a model of V tokens has no row for.

    ``begins``: the token that begins a text comes first, where the tokenizer has one; a chat template writes its own.
    """
    return [i for i in Tokenizer.from_str(tokenizer).encode(text, add_special_tokens=begins).ids if i < V]


def arbitrary(V: int, count: int) -> list[int]:
    """Tokens of a model that has no tokenizer."""
    return [(7919 * i + 13) % V for i in range(count)]
