# ruff: noqa: RUF001 (Chinese punctuation)
"""LongBench's 21 tasks: prompt, longest answer and metric of each, as in its `config` folder and `eval.py`."""

from dataclasses import dataclass

from kvpop_jax.models import Style


@dataclass(frozen=True)
class Dataset:
    """One task.

    Attributes:
        name: LongBench's own.
        metric: Of `metrics.METRICS`.
        answer_tokens: Longest answer.
        prompt: With places for `{context}` and `{input}`, the question.
        style: "plain" for examples and code to be gone on with, which get no chat template.
        first_line: Whether only the first line of an answer counts.
    """

    name: str
    metric: str
    answer_tokens: int
    prompt: str
    style: Style = "brief"
    first_line: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)

DATASETS = (
    Dataset(
        "narrativeqa",
        "f1",
        128,
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single "
        "phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
    ),
    Dataset(
        "qasper",
        "f1",
        128,
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
        'based on the information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\n'
        "Answer:",
    ),
    Dataset(
        "multifieldqa_en",
        "f1",
        64,
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\n"
        "Answer:",
    ),
    Dataset(
        "multifieldqa_zh",
        "f1_zh",
        64,
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n"
        "回答：",
    ),
    Dataset("hotpotqa", "f1", 32, _PASSAGES),
    Dataset("2wikimqa", "f1", 32, _PASSAGES),
    Dataset("musique", "f1", 32, _PASSAGES),
    Dataset(
        "dureader",
        "rouge_l_zh",
        128,
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
    ),
    Dataset(
        "gov_report",
        "rouge_l",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    Dataset(
        "qmsum",
        "rouge_l",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
        "one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    Dataset(
        "multi_news",
        "rouge_l",
        512,
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    ),
    Dataset(
        "vcsum",
        "rouge_l_zh",
        512,
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    ),
    Dataset(
        "trec",
        "accuracy",
        64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        style="plain",
        first_line=True,
    ),
    Dataset(
        "triviaqa",
        "f1",
        32,
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        style="plain",
        first_line=True,
    ),
    Dataset(
        "samsum",
        "rouge_l",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        style="plain",
        first_line=True,
    ),
    Dataset(
        "lsht",
        "accuracy",
        64,
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        style="plain",
        first_line=True,
    ),
    Dataset(
        "passage_count",
        "count",
        32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In "
        "other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format should only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
    ),
    Dataset(
        "passage_retrieval_en",
        "retrieval",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of "
        'the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\nThe answer is: ",
    ),
    Dataset(
        "passage_retrieval_zh",
        "retrieval",
        32,
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n'
        "答案是：",
    ),
    Dataset(
        "lcc",
        "edit_similarity",
        64,
        "Please complete the code given below. \n{context}Next line of code:\n",
        style="plain",
    ),
    Dataset(
        "repobench-p",
        "edit_similarity",
        64,
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        style="plain",
    ),
)
