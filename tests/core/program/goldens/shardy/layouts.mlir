// the order of dimensions in memory, asked for and left to the compiler
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.layout_mode = "{0,1}", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 0 : i32}, %arg1: tensor<8x8xf32> {jax.buffer_donor = true, mhlo.layout_mode = "auto", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<8x8xf32> {mhlo.layout_mode = "{0,1}", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, tensor<8x8xf32> {mhlo.layout_mode = "auto", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
    return %arg0, %arg1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}
