"""Ask a service with the plain `openai` package: openai_client.py BASE_URL QUESTION

Start the service with `reader-rag serve --store STORE` first; BASE_URL is then http://127.0.0.1:8000/v1.
"""

import json
import sys

import openai

CODE = "def area(width, height):\n    return width * height\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "area",
            "description": "The area of a rectangle.",
            "parameters": {
                "type": "object",
                "properties": {"width": {"type": "integer"}, "height": {"type": "integer"}},
                "required": ["width", "height"],
            },
        },
    }
]


def citations(client: openai.OpenAI, model: str, question: str) -> None:
    """Answer from the documents, with the spans that were copied from them."""
    messages = [{"role": "user", "content": question}]
    message = client.chat.completions.create(model=f"{model}+docs", messages=messages).choices[0].message
    print(message.content)
    for annotation in message.annotations or []:
        cited = annotation.url_citation
        print(f"  «{message.content[cited.start_index : cited.end_index]}» {cited.title} {cited.url}")


def predicted_outputs(client: openai.OpenAI, model: str) -> None:
    """Edit a text: what the answer repeats of the prediction is accepted several tokens at a time."""
    messages = [{"role": "user", "content": f"Rename the function to size. Write the code only.\n\n{CODE}"}]
    prediction = {"type": "content", "content": CODE}
    answer = client.chat.completions.create(model=model, messages=messages, prediction=prediction)
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    print(f"prediction: {accepted} of {accepted + rejected} tokens accepted")


def tools(client: openai.OpenAI, model: str) -> None:
    """Have a function called, and the answer written with its result."""
    messages = [{"role": "user", "content": "What is the area of a room of 3 by 4 metres?"}]
    called = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    message = called.choices[0].message
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        print(f"tool: {call.function.name}({arguments})")
        result = str(arguments["width"] * arguments["height"])
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=model, messages=messages)
    print(answer.choices[0].message.content)


def main(base_url: str, question: str, key: str = "none") -> None:
    """Show citations, predicted outputs and tools.

    Args:
        base_url: Address of the API.
        question: A question about the documents.
        key: The API key, where the service asks for one.
    """
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        model = client.models.list().data[0].id
        citations(client, model, question)
        predicted_outputs(client, model)
        tools(client, model)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
