"""A small byte-level BPE tokenizer with Qwen's chat and tool-call markup, trained on the transcripts."""

from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Not special tokens, as in Qwen's tokenizers: decoding keeps them, so that tool calls can be parsed.
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

_ANSWER = "{{- '<|im_start|>assistant\\n' + (message.content or '') }}"
_ANSWER_WITH_THINKING = """{{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- (message.content or '').lstrip('\\n') }}"""

# Qwen's ChatML template with Hermes tool calls, without the reasoning parts.
CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build_tokenizer(
    transcripts: list[dict],
    context: int,
    *,
    vocabulary: int = 1024,
    isolated: str = "",
    keep_thinking: bool = False,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the text of `transcripts`.

    Text between the isolated parts merges without a length limit, so that the constant parts of the agent's
    prompt become a few long tokens. This keeps the prompt short for the small model.

    Args:
        transcripts: Rows with `messages`, and with `tools` if the agent has tools.
        context: Maximum sequence length of the model, in tokens.
        vocabulary: Maximum number of tokens.
        isolated: Regular expression. Each match is a separate token. With "", each digit is a separate token.
        keep_thinking: Whether the chat template renders the thinking of every answer. If False, it renders none.
    """
    from tokenizers import trainers

    template = CHAT_TEMPLATE.replace(_ANSWER, _ANSWER_WITH_THINKING) if keep_thinking else CHAT_TEMPLATE
    blank = _wrap(_bpe(isolated), context, template)
    texts = [blank.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False) for row in transcripts]
    tokenizer = _bpe(isolated)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKUP),
        special_tokens=SPECIAL,
        initial_alphabet=_alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_between_markup(texts), trainer)
    return _wrap(tokenizer, context, template)


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _bpe(isolated: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(isolated), "isolated")
            if isolated
            else pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer, context: int, template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(MARKUP, special_tokens=False)
    fast.chat_template = template
    return fast


def _between_markup(texts: list[str]) -> list[str]:
    """Return the pieces of text between markup tokens, which are added separately and must not take part in merges."""
    import re

    markup = "|".join(re.escape(token) for token in (*SPECIAL, *MARKUP))
    return [piece for text in texts for piece in re.split(markup, text) if piece]
