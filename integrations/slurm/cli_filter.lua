--[[
Asks the gpumemnet service how much GPU memory a job will take, before sbatch, salloc or srun send it to the controller.

The user names a job description (JSON) by  --comment=gpumemnet:job.json  or in the variable GPUMEMNET_JOB; or in its place the
model that is fine-tuned, and how, as  gpumemnet:model=Qwen/Qwen3-8B,method=qlora,sequence_length=4096.  The filter asks
the service with curl, sets  --gres=shard:N  unless the user has asked for GPUs otherwise, and leaves  gpumemnet:<prediction id>
in the comment, by which `gpumemnet observations import-sacct` joins what the job really used.  It fails open: whatever goes wrong, the job
goes on as it was written.  README.md beside this file tells how to install it.
--]]

local SETTINGS = {
  url = "http://127.0.0.1:8000", -- GPUMEMNET_URL
  key_file = "", -- GPUMEMNET_API_KEY_FILE: holds a key of scope predict; empty for none
  gpu = "", -- GPUMEMNET_GPU: name of the site's GPU in the service's catalogue; empty for the service's
  mib_per_shard = 1024, -- GPUMEMNET_MIB_PER_SHARD
  shards_per_gpu = 0, -- GPUMEMNET_SHARDS_PER_GPU: a job that needs more gets none; 0 does not look
  amount = "limit", -- GPUMEMNET_SHARD_AMOUNT: "limit" (safe) or "request" (about the median)
  timeout_seconds = 0.5, -- GPUMEMNET_TIMEOUT_SECONDS
}

local MAX_JOB_BYTES = 4 * 1024 * 1024
local TOKEN = "gpumemnet:(%S+)"
local UUID = "^%x%x%x%x%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$"
-- Options by which a user asks for GPUs; one that is set keeps the filter from adding shards.
local GPU_OPTIONS = { "gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task" }
local UNSET = { [""] = true, unset = true, ["(null)"] = true, ["invalid-context"] = true }

local function setting(name, variable)
  local text = os.getenv(variable)
  if text == nil or text == "" then
    return SETTINGS[name]
  end
  if type(SETTINGS[name]) ~= "number" then
    return text
  end
  local number = tonumber(text)
  if number == nil or number ~= number or number < 0 or number == math.huge then
    error(variable .. " must be a number that is not negative", 0)
  end
  return number
end

local function option(options, name)
  local ok, value = pcall(function() return options[name] end)
  if not ok or type(value) ~= "string" or UNSET[value] then
    return nil
  end
  return value
end

-- A JSON reader: curl and Lua are all that a submission host is sure to have. ---------------------------------------------

local MAX_DEPTH = 64
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local read_value

local function after_space(text, at)
  return (string.find(text, "[^ \t\r\n]", at) or #text + 1)
end

local function read_string(text, at)
  local parts, from = {}, at + 1
  while true do
    local stop = string.find(text, '["\\]', from)
    if stop == nil then error("the answer is not JSON", 0) end
    parts[#parts + 1] = string.sub(text, from, stop - 1)
    if string.sub(text, stop, stop) == '"' then
      return table.concat(parts), stop + 1
    end
    local letter = string.sub(text, stop + 1, stop + 1)
    if letter == "u" then
      parts[#parts + 1] = "?" -- only sentences hold any, and they are only shown
      from = stop + 6
    else
      parts[#parts + 1] = ESCAPES[letter] or error("the answer is not JSON", 0)
      from = stop + 2
    end
  end
end

local function read_members(text, at, depth, closing, read_member)
  local place = after_space(text, at + 1)
  if string.sub(text, place, place) == closing then
    return place + 1
  end
  while true do
    place = after_space(text, read_member(place, depth + 1))
    local mark = string.sub(text, place, place)
    if mark == closing then return place + 1 end
    if mark ~= "," then error("the answer is not JSON", 0) end
    place = after_space(text, place + 1)
  end
end

function read_value(text, at, depth)
  if depth > MAX_DEPTH then error("the answer is nested too deeply", 0) end
  local mark = string.sub(text, at, at)
  if mark == '"' then
    return read_string(text, at)
  elseif mark == "{" then
    local object = {}
    return object, read_members(text, at, depth, "}", function(place, inner)
      if string.sub(text, place, place) ~= '"' then error("the answer is not JSON", 0) end
      local name, colon, value
      name, colon = read_string(text, place)
      colon = after_space(text, colon)
      if string.sub(text, colon, colon) ~= ":" then error("the answer is not JSON", 0) end
      value, place = read_value(text, after_space(text, colon + 1), inner)
      object[name] = value
      return place
    end)
  elseif mark == "[" then
    local list = {}
    return list, read_members(text, at, depth, "]", function(place, inner)
      local value
      value, place = read_value(text, place, inner)
      list[#list + 1] = value
      return place
    end)
  end
  local word = string.match(text, "^[%w%.%+%-]+", at)
  if word == "null" then return nil, at + 4 end
  if word == "true" then return true, at + 4 end
  if word == "false" then return false, at + 5 end
  local number = word and tonumber(word)
  if number == nil then error("the answer is not JSON", 0) end
  return number, at + #word
end

local function json_text(text)
  return '"' .. string.gsub(text, '[%c"\\]', function(letter) return string.format("\\u%04x", string.byte(letter)) end) .. '"'
end

local function is_whole(number)
  return type(number) == "number" and number > 0 and number == math.floor(number) and number < 2 ^ 53
end

-- Asking ------------------------------------------------------------------------------------------------------------------

local function read_file(path, limit, what)
  local file, reason = io.open(path, "rb")
  if file == nil then error("cannot read " .. what .. " (" .. reason .. ")", 0) end
  local content = file:read(limit + 1)
  file:close()
  if content == nil then error(what .. " is empty or cannot be read: " .. path, 0) end
  if #content > limit then error(what .. " is larger than " .. limit .. " bytes: " .. path, 0) end
  return content
end

local function write_file(path, content)
  local file = assert(io.open(path, "wb"))
  file:write(content)
  file:close()
end

-- A value for curl's configuration file, where no shell ever sees it.
local function quoted(text)
  if string.find(text, "%c") then error("a setting holds a control character", 0) end
  return '"' .. string.gsub(text, '["\\]', "\\%0") .. '"'
end

local function shell_quoted(text)
  return "'" .. string.gsub(text, "'", "'\\''") .. "'"
end

-- The question by a model's name as JSON, from  model=NAME,option=value,…  What has no = goes on with the value before it.
local function fit_body(text, gpu)
  local names, values = { "gpu" }, { gpu = gpu }
  for part in string.gmatch(text, "[^,]+") do
    local name, value = string.match(part, "^([%w_-]+)=(.*)$")
    if name then
      name = string.gsub(name, "-", "_")
      if values[name] == nil then names[#names + 1] = name end
      values[name] = value
    else
      local last = names[#names]
      values[last] = values[last] .. "," .. part
    end
  end
  local members = {}
  for _, name in ipairs(names) do
    local value = values[name]
    local is_plain = value == "true" or value == "false" or (#value < 16 and string.match(value, "^[1-9]%d*$"))
    if value ~= "" then members[#members + 1] = json_text(name) .. ":" .. (is_plain and value or json_text(value)) end
  end
  return "{" .. table.concat(members, ",") .. "}"
end

-- The service's answer to a job description, or to a question by a model's name, as a table.
local function ask(job, is_fit)
  local gpu = setting("gpu", "GPUMEMNET_GPU")
  local body
  if is_fit then
    body = fit_body(job, gpu)
  else
    body = '{"job":' .. job .. (gpu ~= "" and ',"gpu":' .. json_text(gpu) or "") .. "}"
  end

  local body_path, config_path = os.tmpname(), os.tmpname() -- created for this user alone
  local ok, output = pcall(function()
    local config = {
      "url = " .. quoted(string.gsub(setting("url", "GPUMEMNET_URL"), "/+$", "") .. (is_fit and "/v1/fit" or "/v1/predict")),
      "max-time = " .. setting("timeout_seconds", "GPUMEMNET_TIMEOUT_SECONDS"),
      "header = " .. quoted("Content-Type: application/json"),
      "header = " .. quoted("Expect:"),
      "data-binary = " .. quoted("@" .. body_path),
      "silent",
      'noproxy = "*"',
      "globoff",
      'proto = "=http,https"',
      'write-out = "\\n%{http_code}"',
    }
    local key_file = setting("key_file", "GPUMEMNET_API_KEY_FILE")
    if key_file ~= "" then
      local key = string.match(read_file(key_file, 4096, "the key file"), "^%s*(.-)%s*$")
      config[#config + 1] = "header = " .. quoted("Authorization: Bearer " .. key) -- here and not in the process list
    end
    write_file(body_path, body)
    write_file(config_path, table.concat(config, "\n") .. "\n")
    local curl = assert(io.popen("curl -q --config " .. shell_quoted(config_path) .. " 2>/dev/null", "r"))
    local text = curl:read("*a")
    curl:close()
    return text or ""
  end)
  os.remove(body_path)
  os.remove(config_path)
  if not ok then error(output, 0) end

  local content, status = string.match(output, "^(.*)\n(%d+)$")
  if status == nil or status == "000" then error("the service did not answer in time", 0) end
  local read, answer = pcall(read_value, content, after_space(content, 1), 0)
  if not read or type(answer) ~= "table" then answer = {} end
  if status ~= "200" then
    local detail = type(answer.detail) == "string" and answer.detail or "no reason given"
    error("the service refused (" .. status .. "): " .. detail, 0)
  end
  if is_fit and is_whole(answer.safe_bytes) and type(answer.method) == "table" then return answer end
  if type(answer.prediction_id) ~= "string" or not string.match(answer.prediction_id, UUID) then
    error("the answer is none of a gpumemnet service: is the URL right?", 0)
  end
  return answer
end

-- Deciding ----------------------------------------------------------------------------------------------------------------

-- Bytes as MiB, rounded up; nil for what is no amount.
local function mib(bytes)
  return is_whole(bytes) and math.ceil(bytes / 2 ^ 20) or nil
end

-- How many replicas the job is one of.  The service has accepted the text, so nothing else in it can be called that.
local function ranks_of(job)
  return tonumber(string.match(job, '"ranks"%s*:%s*(%d+)') or 1)
end

-- The generic resources to ask for, or nil and the sentence that says why none.
local function shards(answer, options, ranks)
  for _, name in ipairs(GPU_OPTIONS) do
    if option(options, name) then return nil, nil end
  end
  if string.find(option(options, "tres-per-task") or "", "gres", 1, true) then return nil, nil end -- also holds CPUs
  if ranks > 1 then
    return nil, string.format("the job is one of %d replicas: ask for as many GPUs, shards are parts of one", ranks)
  end
  local amount_mib, expected_mib = mib(answer.safe_bytes), mib(answer.expected_bytes)
  if not is_whole(amount_mib) then
    local reasons = type(answer.reasons) == "table" and answer.reasons or {}
    return nil, "no safe amount is known for this job: " .. tostring(reasons[1] or "no reason given")
  end
  if setting("amount", "GPUMEMNET_SHARD_AMOUNT") == "request" then amount_mib = expected_mib end
  local mib_per_shard = setting("mib_per_shard", "GPUMEMNET_MIB_PER_SHARD")
  if not is_whole(amount_mib) or not is_whole(mib_per_shard) then
    return nil, "GPUMEMNET_MIB_PER_SHARD or the answer is no whole number above 0"
  end
  local count = math.ceil(amount_mib / mib_per_shard)
  local most = setting("shards_per_gpu", "GPUMEMNET_SHARDS_PER_GPU")
  if most > 0 and count > most then
    return nil, string.format("the job needs %d MiB, more than one GPU's %d shards: ask for a whole GPU", amount_mib, most)
  end
  return string.format("shard:%d", count), string.format("%d MiB expected, %s MiB set aside as shard:%d", expected_mib or 0,
    string.format("%d", amount_mib), count)
end

-- Path of the job description or the question by a model's name, and the token of the comment that named it (nil when the variable did).
local function job_path(options, component)
  local comment = option(options, "comment")
  local named = comment and string.match(comment, TOKEN)
  if named then
    if string.match(named, UUID) then return nil end -- the id of an earlier submission, sent again
    return named, "gpumemnet:" .. named
  end
  local variable = os.getenv("GPUMEMNET_JOB")
  if variable and variable ~= "" and component <= 0 then return variable, nil end
  return nil
end

local function replaced(text, old, new)
  local first, last = string.find(text, old, 1, true)
  return string.sub(text, 1, first - 1) .. new .. string.sub(text, last + 1)
end

local function fill_in(options, component)
  -- srun inside a job starts a step: what it may use is settled, and the job's variables are its own
  if option(options, "type") == "srun" and os.getenv("SLURM_JOB_ID") then return end
  local path, token = job_path(options, component)
  if path == nil then return end
  local is_fit = string.match(path, "^model=") ~= nil
  local job = is_fit and path or read_file(path, MAX_JOB_BYTES, "the job description")
  local answer = ask(job, is_fit)
  local gres, sentence = shards(answer, options, is_fit and answer.method.gpus or ranks_of(job))
  if not is_fit then -- an answer by name is not kept, and has no id
    local mark = "gpumemnet:" .. answer.prediction_id
    local comment = option(options, "comment")
    if token then
      comment = replaced(comment, token, mark)
    else
      comment = comment and comment .. " " .. mark or mark
    end
    options["comment"] = comment
  end
  if gres then options["gres"] = gres end
  if sentence then slurm.log_info("%s", "gpumemnet: " .. sentence) end
end

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
  local ok, reason = pcall(fill_in, options, tonumber(pack_offset) or 0)
  if not ok then
    pcall(slurm.log_info, "%s", "gpumemnet: the job is submitted as it is: " .. tostring(reason))
  end
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
  return slurm.SUCCESS
end
