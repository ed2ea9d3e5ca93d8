"""The agent: a LangGraph agent with one tool. Only the line with `model` differs from an agent in production."""

from langgraph.prebuilt import create_react_agent

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class DigitsAgent(Workflow):
    """Answer with the help of a tool, and pass the answer to the judge."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        model = model_tuner.as_langchain_chat_model()  # was: ChatOpenAI(model="gpt-4o")
        agent = create_react_agent(model, [multiply], prompt="Answer in digits.")
        state = await agent.ainvoke({"messages": [{"role": "user", "content": workflow_task.main_query}]})
        bp("ANSWER")  # stops in the debugger with --db=ANSWER
        return WorkflowOutput(metadata={"final_answer": state["messages"][-1].content})
