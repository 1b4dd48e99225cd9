"""What `--help` says of each command before its options."""

OVERVIEW = """\
Weightbeam moves model weights between Hugging Face releases and MaxText or JAX.

  weightbeam plan    hf://Qwen/Qwen3-8B        what would happen
  weightbeam convert hf://Qwen/Qwen3-8B ckpt   into an Orbax checkpoint
  weightbeam verify  ckpt                      is every element right?
  weightbeam inspect ckpt                      what a checkpoint holds
  weightbeam export  ckpt tuned                back into a Hugging Face release
"""

PLAN = """\
Reads config.json and the headers of the safetensors files, and says what a conversion would do: arrays, chunks,
units, bytes, memory, what is lossy, what is left out and why, and every problem. It writes nothing but --json FILE.
The last line says whether the conversion can go ahead, and the command.

  weightbeam plan ~/models/Qwen3-8B
  weightbeam plan hf://deepseek-ai/DeepSeek-V3 --mesh fsdp=64 --workers 1,10,100

With --workers it simulates the conversion on so many workers of Dataflow, or of Flink with --runner=FlinkRunner, from
a bucket or the hub into a bucket: the time, the cost, and what limits them. `weightbeam help workers` says what it
assumes.

`weightbeam plan COMMAND …` plans another command, such as `weightbeam plan materialize ckpt new`.

Exit status: 0 the conversion can go ahead, 2 it can't.
"""

CONVERT = """\
Converts a checkpoint as one Beam pipeline: on this machine's cores by default, elsewhere with Beam's --runner. The
result lies in OUTPUT/STEP and loads in MaxText with load_parameters_path=OUTPUT/STEP/items. It appears there whole,
at the end. A conversion that was stopped goes on with --resume.

  weightbeam convert hf://Qwen/Qwen3-8B gs://bucket/qwen3-8b
  weightbeam convert ~/models/Llama-3.1-8B ckpt --mesh fsdp=16
  weightbeam convert ~/models/Qwen3-8B ckpt --scan_layers false

Every option of Beam's passes through, such as --direct_num_workers (threads of a local run).

Exit status: 0 done, 1 failed on the way, 2 refused before any work, 130 after Ctrl-C.
"""

INSPECT = """\
Shows what a checkpoint holds: the arrays of an Orbax checkpoint (ours or anyone's; its root, a step or an item), or
the tensors of a folder of safetensors files: shapes, dtypes, chunks and bytes.

With --mesh it says what loading an Orbax checkpoint costs on that mesh: bytes read by the bytes needed, and the
number of reads, for hosts with one device each (one with several reads no more than they do together). That needs the
logical axes of the arrays: Weightbeam's checkpoints tell them; for others, --source names a folder with the model's
config.json.

  weightbeam inspect ckpt
  weightbeam inspect ckpt --mesh fsdp=16 --mesh fsdp=8,tensor=2
  weightbeam inspect maxtext/0/items --mesh fsdp=16 --source ~/models/Llama
"""


FIT = """\
Compares what MaxText must be told of a release, from its config.json, with what one of MaxText's models or a file
says: each key that differs, what is needed, what is said, and what the difference would do. Says too what MaxText
can't express. Reads no weights.

  weightbeam fit ~/models/Qwen3-8B qwen3-8b
  weightbeam fit hf://Qwen/Qwen3-8B my_model.yml

Exit status: 0 it fits, 1 something differs, 2 it can't be compared.
"""

VERIFY = """\
Compares every element of a checkpoint with the tensors it was made of, in a way of its own: it reads the arrays back,
turns them into the tensors' layout, and says which are exact, which are rounded as documented, and which are
different, with the tensor and the first index. Works on checkpoints that MaxText's own converter wrote, too. It
runs on this machine, in as many threads as --direct_num_workers=N says.

  weightbeam verify ckpt
  weightbeam verify ~/models/Qwen3-8B ckpt --sample 0.05

What isn't given is taken from the checkpoint: its source, its layout, its vocabulary, and whether it has MTP layers
or towers.

Exit status: 0 all of it is right, 1 something differs, or it failed on the way; 2 it can't be compared.
"""


MATERIALIZE = """\
Makes an ordinary checkpoint of a virtual one: the same arrays, in chunks for a mesh, without any file of the source.
First it makes sure that the files which the checkpoint refers to are those it was made of. As a Beam pipeline: Beam's
options pass through.

  weightbeam materialize ckpt ordinary --mesh fsdp=16

The layout is the checkpoint's. The result is the same as that of weightbeam convert --mesh on the source.

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


DIFF = """\
Compares two checkpoints of any kinds, every element of every tensor, in one spelling: releases (quantised ones by
their values) and Orbax checkpoints, ours or MaxText's, in a folder, gs:// or (releases) hf://. Says of each tensor
whether it is equal, rounded (no element is off by more than one step of the coarser dtype), changed (the norm of the
change over that of the tensor in A, the largest and the mean difference, the share of elements that differ, the cosine
of the angle between both) or missing; what changed most comes first, then kinds of tensors and layers. A release
beside an Orbax checkpoint is compared as it would be converted into it. Two training states are compared with the
optimizer and the rest (--state params: the weights alone); the last lines count what has no like on the other side.

  weightbeam diff ~/models/Qwen3-8B qwen3-8b-tuned
  weightbeam diff hf://Qwen/Qwen3-8B ckpt/0/items --tolerance 1e-2
  weightbeam diff qwen3-8b-tuned qwen3-8b-fp8 --fail_over 0.05

Exit status: 0 the same within the tolerance, or no tensor changed by more than --fail_over; 1 not, or it failed on the
way; 2 they can't be compared.
"""

LOGITS = """\
Says what a model makes of some tokens: transformers' own layers on the CPU, with the weights of one layer in memory at
a time, quantised ones by their values. With a second one, a release, an Orbax checkpoint read back through its table,
or an adapter, says how far the logits are apart, and the first layer where both part. With --maxtext the second one is
MaxText itself: the release is converted, and run there with the maxtext.yml that convert writes and nothing else.

  weightbeam logits ~/models/Qwen3-8B --prompt "The capital of France is"
  weightbeam logits ~/models/Qwen3-8B qwen3-8b-fp8 --token_ids 785,6722,315
  weightbeam logits ~/Qwen3-8B --token_ids 785,6722 --maxtext env/bin/python

Needs torch and transformers (the extra `models`). Layers are counted from 0.

Exit status: 0 done, and no layer parts by more than --tolerance; 1 one does, or it failed on the way; 2 it
can't be done.
"""

RESHARD = """\
Writes an Orbax checkpoint anew: cut for another mesh, with layers stacked or apart, in another dtype or storage, with
or without the optimizer, or some of its layers and experts alone. The checkpoint may be anyone's: one of Weightbeam's, of MaxText's training with all of its
state, of post-training. Chunks that fit already are copied as they are encoded; each other chunk is decoded once. As
a Beam pipeline.

  weightbeam reshard ckpt ckpt64 --mesh fsdp=64
  weightbeam reshard run/checkpoints/1000 served --state params
  weightbeam reshard run/checkpoints/1000 apart --scan_layers false \\
      --like hf://Qwen/Qwen3-8B
  weightbeam reshard ckpt merged --lora run/checkpoints/500
  weightbeam reshard ckpt small --layers 0:4

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


EXPORT = """\
Writes an Orbax checkpoint as a Hugging Face release: safetensors files and index, config.json, tokenizer and the
other small files. The checkpoint may be one of Weightbeam's, of MaxText's converter, or one that MaxText's training
wrote. What it remembers of its release, or --like, says how the release should look. Values are computed in float32
and cast once. As a Beam pipeline.

  weightbeam export ckpt qwen3-8b-tuned
  weightbeam export run/checkpoints/1000 tuned --like hf://Qwen/Qwen3-8B

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


CUT = """\
Writes a small model with real weights: some layers of a release, some experts of each layer, some rows of the
vocabulary, as a release of their own that transformers loads and convert takes. Tensors are carried over byte for
byte under their new numbers, codes and scales among them; config.json, its lists by layer and its quantisation's names
are cut alike. From the hub only what is kept is read.

  weightbeam cut hf://deepseek-ai/DeepSeek-V3 mini --layers 0:4 --experts 0:16
  weightbeam cut ~/models/Qwen3-8B tiny --layers 0:4 --vocab_rows 1000

plan, inspect, convert, quantize, dequantize, merge and logits take --layers, --experts and --vocab_rows themselves, and
reshard --layers and --experts.
`weightbeam help cutting` says what is kept, and what is refused.

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


DEQUANTIZE = """\
Writes a quantised release with the values of its weights: computed in float32, cast once. What isn't quantised is
carried over byte for byte, config.json loses its quantization_config, and the other small files stay as they are.
Every format that convert reads.

  weightbeam dequantize hf://deepseek-ai/DeepSeek-V3 deepseek-v3-bf16

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


QUANTIZE = """\
Writes the linear layers of a model as FP8 in blocks of 128 × 128, in DeepSeek's layout, which vLLM, SGLang and
transformers load: codes, and a float32 scale for each block. Embeddings, norms, routers, the head and towers stay as
they are, and config.json names them. The source is a release, or an Orbax checkpoint, which is exported in the same
pass. As a Beam pipeline.

  weightbeam quantize ~/models/Qwen3-8B qwen3-8b-fp8
  weightbeam quantize run/checkpoints/1000 tuned-fp8 --like hf://Qwen/Qwen3-8B

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


MERGE = """\
Merges PEFT adapters into a release: the same safetensors files with the adapters in them; tokenizer, code and licence
as they were. In float32 with one cast; what no adapter reaches is carried over byte for byte, quantised weights
included. As a Beam pipeline.

  weightbeam merge hf://Qwen/Qwen3-8B qwen3-8b-tuned --lora my-adapter
  weightbeam merge ~/models/Qwen3-8B both --lora math,0.7 --lora code,0.3

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


WATCH = """\
Converts the releases of the hub that a configuration asks for: looks for models that match, waits until a release is
complete, refuses it with the reason or converts, verifies and publishes it, and records each step in the output. Any
number of watchers may run at once. `weightbeam help watching` explains the configuration.

With --run it follows a training run instead: each step, once committed, becomes a release that transformers loads,
compared with the checkpoint, published and announced. `weightbeam help following` explains it.

  weightbeam watch --config watch.yaml --dry_run        what would be done
  weightbeam watch --config watch.yaml --once           for schedulers
  weightbeam watch --config gs://bucket/watch.yaml --interval 15m --serve 8080
  weightbeam watch --run gs://bucket/run/checkpoints --like hf://Qwen/Qwen3-8B \\
      --output hf://me/qwen3-8b-tuned --every 1000

Exit status: 0 nothing failed, 1 something did, 2 the configuration is refused.
"""

NEW_FAMILY = """\
Writes the first draft of a family's table into the current folder, from config.json and the headers of a release, and
beside it the headers and a test. Tensors of alike layers are one line; axes have the words of config.json's sizes. What
headers can't tell is marked TODO, and the test fails until none is left.

  weightbeam new-family my_model --like ~/models/My-Model-7B
  python -m pytest test_my_model.py
  weightbeam plan ~/models/My-Model-7B --family my_model.py
"""

MODELS = """\
Lists the families that can be converted: the model_type of their config.json, MaxText's models among them, and what
of them is supported.
"""

HELP = """\
Prints a page of the manual, or what a command takes. On a terminal a long page goes through $PAGER.

  weightbeam help running
  weightbeam help convert
"""

COMPLETION = """\
Prints a script that completes commands and options for your shell.

  weightbeam completion bash >> ~/.bashrc
  weightbeam completion fish > ~/.config/fish/completions/weightbeam.fish
"""
