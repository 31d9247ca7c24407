"""What must not be trained on: the held-out conversations, and the evaluation's prompts."""

import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from eagle3_jax.data.conversations import Conversation
from eagle3_jax.errors import DataError

GRAM = 8  # words
REASON = "holds an evaluation prompt"
MOST = 0.5  # largest share of an evaluation prompt's 8-grams that one user turn may hold
LARGEST = 0.5  # of the held-out conversations, for one group

_WORD = re.compile(r"\w+")
_PART = re.compile(r"_\d+$")


def words(text: str) -> list[str]:
    """Lower-case words; punctuation and white space do not count."""
    return _WORD.findall(text.lower())


def held_out(conversations: Sequence[Conversation], fraction: float) -> np.ndarray:
    """Which conversations are kept for validation: bool [n].

    Conversations that share an id (without its part suffix: `abc_0`, `abc_17`) or a first user turn, directly or
    through others, form a group, and a group is held out as a whole, by hash. A group so large that it would be
    most of the validation set is trained on: on real data that is every chat that opens with "continue".
    """
    root = _groups(conversations)
    keys = [_hash(c.id) for c in conversations]
    name, size = {}, {}
    for r, key in zip(root, keys, strict=True):
        name[r], size[r] = min(name.get(r, key), key), size.get(r, 0) + 1
    room = max(1.0, LARGEST * fraction * len(conversations))
    chosen = {r: size[r] <= room and int(_hash(name[r])[:13], 16) < fraction * 16**13 for r in name}
    return np.array([chosen[r] for r in root], bool)


def _groups(conversations: Sequence[Conversation]) -> list[int]:
    """The first member of each conversation's group (union-find over the two keys)."""
    parent, seen = list(range(len(conversations))), {}

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, conversation in enumerate(conversations):
        question = next(text for role, text in conversation.turns if role == "user")
        for key in (("id", _PART.sub("", conversation.id)), ("question", _normal(question))):
            a, b = find(seen.setdefault(key, i)), find(i)
            parent[max(a, b)] = min(a, b)
    return [find(i) for i in range(len(conversations))]


def _normal(text: str) -> str:
    """What two texts with the same words share; a text without words (signs only) stands for itself."""
    return " ".join(words(text)) or text.strip()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class EvaluationPrompts:
    """Evaluation prompts, indexed by their 8-grams of words."""

    def __init__(self, prompts: Iterable[str]):
        self.texts = {_normal(p) for p in prompts}
        self._grams: dict[tuple, list[int]] = {}  # 8-gram -> prompts that hold it
        self._sizes: list[int] = []
        for text in sorted(self.texts):
            for gram in (grams := _grams(text.split())):
                self._grams.setdefault(gram, []).append(len(self._sizes))
            self._sizes.append(len(grams))

    @property
    def digest(self) -> str:
        """sha256 of the normalised prompts, whatever their order."""
        return _hash("\n".join(sorted(self.texts)))

    def overlap(self, conversation: Conversation) -> float:
        """Largest share, 0 .. 1, of a prompt's 8-grams inside one user turn; 1 where the texts are equal."""
        return max((self._turn(text) for role, text in conversation.turns if role == "user"), default=0.0)

    def _turn(self, text: str) -> float:
        if _normal(text) in self.texts:
            return 1.0
        found: dict[int, int] = {}
        for gram in _grams(words(text)) & self._grams.keys():
            for prompt in self._grams[gram]:
                found[prompt] = found.get(prompt, 0) + 1
        return max((n / self._sizes[prompt] for prompt, n in found.items()), default=0.0)


def _grams(found: list[str]) -> set[tuple]:
    return set(zip(*(found[i:] for i in range(GRAM)), strict=False))


def contaminated(conversations: Iterable[Conversation], prompts: EvaluationPrompts) -> np.ndarray:
    """Which conversations hold an evaluation prompt: bool [n]."""
    return np.array([prompts.overlap(c) > MOST for c in conversations], bool)


def assert_clean(record: dict, evaluation_prompts: Iterable[str]) -> None:
    """Refuse prepared data that holds an evaluation prompt, or was not checked against exactly these.

    `record` is the `contamination` entry of data.json. Raises DataError.
    """
    prompts = EvaluationPrompts(evaluation_prompts)
    if record["digest"] != prompts.digest:
        raise DataError(
            f"the prepared data was checked against {record['prompts']} other evaluation prompts than these "
            f"{len(prompts.texts)}; run `eagle3 prepare` again"
        )
    if record["max_overlap"] > MOST:
        raise DataError(
            f"the prepared data holds an evaluation prompt: {record['max_overlap']:.0%} of its 8-grams, at most "
            f"{MOST:.0%} is allowed; run `eagle3 prepare` again"
        )
