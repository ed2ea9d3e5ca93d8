"""The agent: a program that knows nothing of astuner, in any language. Its last line of output is the result.

It calls the model over HTTP, as any client of OpenAI's API does: `OpenAI()` of the OpenAI SDK works without changes.
"""

import json
import os
from urllib.request import Request, urlopen


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body.encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def main() -> None:
    """Answer the task in TASK_JSON, and print the reward, the share of digits; only digits solve the task."""
    task = json.loads(os.environ["TASK_JSON"])
    system = {"role": "system", "content": "Answer in digits."}
    answer = ask([system, {"role": "user", "content": task["main_query"]}])
    share = sum(character in "0123456789" for character in answer) / max(len(answer), 1)
    print(json.dumps({"reward": share, "is_success": share == 1}))


if __name__ == "__main__":
    main()
