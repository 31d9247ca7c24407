"""A byte-level tokenizer made by hand, and chat templates of the kinds that real models have."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
INST = (  # no generation prompt: the answer follows the question's closing mark
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)
THINKING = (  # earlier answers lose their thoughts, the last one gets an empty thought if it has none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set bare = m.content.split('</think>')[-1] %}"
    "{% if not loop.last %}{{ bare }}{% elif '</think>' in m.content %}{{ m.content }}"
    "{% else %}{{ '<think>\n\n</think>\n\n' + m.content }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def tokenizer(template, trim_offsets=True):
    """Byte-level, a few merges; like Llama's, it would put a BOS before any text it is not told to leave alone."""
    merges = [("Ġ", "N"), ("ĠN", "o"), ("Ċ", "Ċ"), ("y", "o"), ("yo", "u")]
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
    core.add_special_tokens([AddedToken(t, special=True) for t in special])
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )
