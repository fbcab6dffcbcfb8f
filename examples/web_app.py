"""A web app around the service: READER_URL=http://127.0.0.1:8000/v1 uvicorn web_app:app --port 8001"""

import html
import os

import openai
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

app = FastAPI()
client = openai.AsyncOpenAI(base_url=os.environ.get("READER_URL", "http://127.0.0.1:8000/v1"), api_key="none")
PAGE = '<!doctype html><title>Ask</title><form><input name="q" value="{}"><button>Ask</button></form><p>{}</p>'


@app.get("/")
async def ask(q: str = "") -> HTMLResponse:
    """The form, and the answer with its copied spans linked to their documents."""
    if not q.strip():
        return HTMLResponse(PAGE.format("", ""))
    models = await client.models.list()
    answer = await client.chat.completions.create(model=models.data[-1].id, messages=[{"role": "user", "content": q}])
    message, shown, position = answer.choices[0].message, "", 0
    for annotation in message.annotations or []:
        cited = annotation.url_citation
        span = html.escape(message.content[cited.start_index : cited.end_index])
        shown += html.escape(message.content[position : cited.start_index])
        shown += f'<a href="{html.escape(cited.url)}" title="{html.escape(cited.title)}">{span}</a>'
        position = cited.end_index
    return HTMLResponse(PAGE.format(html.escape(q), shown + html.escape(message.content[position:])))
