"""Write text with GPT-2 through Hugging Face's own attention: ``python -m task7.inference_ref``.

The same command line as ``task7.inference``, to compare with.
"""

from task7.inference import run

if __name__ == "__main__":
    run(
        None, "sdpa", "Write text with GPT-2 through Hugging Face's own attention (PyTorch's SDPA)."
    )
