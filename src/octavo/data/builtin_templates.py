"""Built-in chat templates for `data.chat_template`: with generation marks, and earlier turns formatted like the last.

The tokenizer must have the template's end-of-turn token. A model that was tuned with a template should stay with it: these are
for base models, and for models whose template strips earlier turns (such as their reasoning, in Qwen3's).
"""

from __future__ import annotations

_CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA_3 = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Tool calls and results as in Qwen3's template; earlier turns retain their reasoning, and none is added to turns without.
_QWEN3 = """
{%- set start = namespace(at=0) %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + ('\\n\\n' if tools else '') }}
        {%- set start.at = 1 %}
    {%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[start.at:] %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if message.reasoning_content %}
                {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n' if message.content or not loop.first else '' }}
                {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
                {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

BUILTIN = {"chatml": _CHATML, "llama-3": _LLAMA_3, "qwen3": _QWEN3}
"""Names → templates."""
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama-3": (*_HEADERS, "<|eot_id|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
"""Names → the special tokens that the tokenizer needs: without them, their names would be encoded as plain text."""
