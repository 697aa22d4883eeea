// Numbers as people read them: amounts in MiB and GiB, shares, and the few sentences built from them.

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

export const count = (number) => whole.format(number);
export const mib = (amount) => `${count(amount)} MiB`;

// An answer with its amounts in MiB, rounded up, as the page shows them.
export const withMib = (answer) => ({
  ...answer,
  request_mib: Math.ceil(answer.expected_bytes / 2 ** 20),
  limit_mib: answer.safe_bytes === null ? null : Math.ceil(answer.safe_bytes / 2 ** 20),
});

export function gib(amountMib) {
  const gibs = amountMib / 1024;
  const digits = gibs >= 100 || Number.isInteger(gibs) ? 0 : gibs >= 10 ? 1 : 2;
  return `${gibs.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits })} GiB`;
}

// A probability never rounds to a certainty that it is not.
export function share(probability) {
  if (probability < 0.001) return "< 0.1 %";
  if (probability > 0.999) return "> 99.9 %";
  return percent(probability);
}

export function percent(part) {
  const digits = part < 0.1 || (part > 0.99 && part < 1) ? 1 : 0;
  return `${(part * 100).toFixed(digits).replace(/\.0$/, "")} %`;
}

export const coverageWords = (coverage) => `${+(coverage * 100).toFixed(3)} % of jobs`;

// A sentence that begins with the name of a field keeps it as it is.
export const capital = (sentence) =>
  /^\w*_/.test(sentence) ? sentence : sentence.charAt(0).toUpperCase() + sentence.slice(1);

// Product names without the maker's, which they all share.
export const shortGpu = (name) => name.replace(/^NVIDIA (GeForce )?/, "");

// "nvidia_smi_device_1s" and the like, in words.
export function labelWords(source) {
  if (source === "traced") return "traces; no GPU has run the jobs";
  if (source.startsWith("nvml")) return "readings of a GPU by NVML";
  if (source.startsWith("nvidia_smi")) return "readings of a GPU by nvidia-smi";
  return source.replaceAll("_", " ");
}
