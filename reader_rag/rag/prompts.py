"""Prompts of the query and chat engines, and the answer without passages.

Prompts are short, with the passages first and the question last: small instruct models follow the last text best.
"""

from __future__ import annotations

from llama_index.core.prompts import PromptTemplate

NOTHING_FOUND = "Nothing was found in the documents for this question."

QA_PROMPT = PromptTemplate(
    "Answer the question using only the text below. Quote the text where you can. "
    "If the text does not contain the answer, say that you do not know.\n\n"
    "Text:\n{context_str}\n\n"
    "Question: {query_str}"
)

REFINE_PROMPT = PromptTemplate(
    "Question: {query_str}\n\n"
    "Answer so far: {existing_answer}\n\n"
    "More text:\n{context_msg}\n\n"
    "If the text adds to the answer, write the improved answer; otherwise repeat the answer so far."
)

CHAT_SYSTEM = (
    "You answer questions about the user's documents. Use only the text above and what was said before. "
    "Quote the text where you can. If it does not contain the answer, say that you do not know."
)

CHAT_CONTEXT = "Text from the documents:\n{context_str}\n\n"

CHAT_REFINE = (
    "More text from the documents:\n{context_msg}\n\n"
    "Answer so far: {existing_answer}\n\n"
    "If the text adds to the answer, write the improved answer; otherwise repeat the answer so far.\n\n"
)

CONDENSE = (
    "Conversation:\n{chat_history}\n\n"
    "Follow-up: {question}\n\n"
    "Rewrite the follow-up as one question that can be understood without the conversation. Write the question only."
)
"""Makes one question of a follow-up and what was said before, to search the documents for."""
